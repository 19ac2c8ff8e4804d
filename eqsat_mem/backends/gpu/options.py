"""Compiler options of plans for a GPU, whatever computes their products; what they change was measured with benchmarks/gpu_visit.py and
benchmarks/gpu_times.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NATIVE_FUSIONS: Mapping[str, str | bool] = MappingProxyType({"xla_gpu_experimental_enable_fusion_autotuner": False})
"""The option that keeps XLA from trying Triton for folds, whose tiles of large extents it compiles for minutes."""
IN_GRAPHS: Mapping[str, str | bool] = MappingProxyType({"xla_gpu_graph_min_graph_size": "1"})
"""The option by which a turn of a loop is one CUDA graph, however few its kernels: XLA launches fewer than five one by one."""
ALWAYS: Mapping[str, str | bool] = MappingProxyType({**NATIVE_FUSIONS, **IN_GRAPHS})
"""The options of every plan."""
UNTRIED: Mapping[str, str | bool] = MappingProxyType({"xla_gpu_autotune_level": "0"})
"""The option that keeps XLA from trying kernels, in XLA's documentation."""
