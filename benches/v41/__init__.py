"""DeepSeek-V4.1's decoder layers in plain PyTorch, with each operation by this project's kernels or by PyTorch's own.

`config` has sizes and what each published layer does, `model` the layers, `operations` what can be chosen, `plain` the
choice without kernels, `parallel` several processes. `benches.v41_layer` and `benches.v41_parallel` measure.
"""
