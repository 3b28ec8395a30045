"""The FP8 path: e4m3 operands with fp32 scales of 128 rows, 128 columns or blocks of 128 x 128.

The rooms are those of the package: `ops` the public functions, `operators` behind them, `reference` the definition,
`launch`, `plan` and `kernels` what runs on Hopper.
"""
