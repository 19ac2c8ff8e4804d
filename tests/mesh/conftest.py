"""Tests on several devices: collected where a process has them (``XLA_FLAGS=--xla_force_host_platform_device_count=8``).

``tests/test_several_devices.py`` starts such processes.
"""

import os

collect_ignore_glob = [] if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "") else ["test_*.py"]
