"""Adapters for other libraries: TensorBoard and Prometheus (`metrics`), PyTorch Lightning (`lightning`).

Nothing else of ecemb imports these modules, and they import their libraries when they are used.
"""
