"""The search for the fastest loop tree whose predicted peak fits the limit, with its models of memory and time."""
