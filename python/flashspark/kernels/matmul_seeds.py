"""Algorithms of cuBLASLt that were quickest somewhere: what `matmul_choice` tries beside what the library lists.

Found by `benchmark/matmul_algorithms.py` among all that the library lists for any number of rows (824 for the layers,
171 for the head), on an H200 with torch 2.11 (CUDA 13.0), at 44 row counts from 1 to 2,048 of Qwen3-8B's products: the
fewest that come within 1 % of the quickest at each of them. Where the library has no such algorithm, or it cannot do a
product, nobody is hurt. The last line of each is of those that were best under load, with 512 to 2,048 rows.
"""

# Tile, splits of the inner dimension, custom option, cluster shape: the library's numbers.
_TO_HALF_PRECISION = """
    10.1.1.4 10.1.3.5 13.1.1.4 15.1.1.4 15.1.3.5 16.1.1.4 16.1.3.5 18.1.1.3 20.1.3.5 28.1.2.5 29.1.1.3 33.2.3.5
    312.1.1.4 315.1.3.5 321.1.1.4 361.1.5.3 393.1.3.5 394.1.3.5 395.1.1.4 396.1.1.3 399.1.1.4 399.1.3.5
    400.1.1.3 401.1.3.5 401.2.3.5 402.1.3.5 402.2.3.5 403.1.1.3 403.2.3.5 404.1.3.5 405.1.1.3 406.1.1.3
    407.1.1.3 410.1.5.3 412.1.5.3 414.1.5.3 453.1.1.3 454.1.1.3 455.1.1.3 456.1.3.5 457.1.3.5 458.1.3.5
    459.1.1.3 460.1.1.3 463.1.5.3 465.1.5.3 495.1.5.3
    20.1.1.3 23.1.4.3 24.1.5.3 24.1.7.5 31.1.5.3 31.1.7.5 209.1.4.3 547.1.7.5
"""
_TO_FLOAT32 = """
    10.1.1.3 20.1.1.3 29.1.1.3 183.1.0.3 184.1.0.3 184.1.2.5 197.1.2.5 404.1.1.3 405.1.1.3 406.1.1.3 407.1.1.3
    408.1.1.3 409.1.1.3 458.1.3.5 459.1.1.3 460.1.3.5 538.1.3.5
    197.1.0.3
"""
_ALGORITHM, _STAGES, _SUM_IN_OUTPUT_TYPE = 66, 35, 2


def configurations(to_float32: bool) -> list[tuple[int, ...]]:
    """As `cublaslt.Algorithm.configuration`; for products of half precision that are put out in float32, or not."""
    found = _TO_FLOAT32 if to_float32 else _TO_HALF_PRECISION
    return [_configuration(*map(int, word.split("."))) for word in found.split()]


def _configuration(tile: int, splits: int, custom: int, cluster: int) -> tuple[int, ...]:
    reduction = _SUM_IN_OUTPUT_TYPE if splits > 1 else 0
    return _ALGORITHM, tile, splits, reduction, 0, custom, _STAGES, 0, cluster
