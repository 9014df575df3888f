"""Matrix instructions: the order of k, the lanes, bytes and codes of block scales, values, denormals, infinities."""

from __future__ import annotations

from typing import Any

import numpy as np

from .experiment import E2M1_VALUES, E4M3_VALUES, LANES, Experiment, pack

ROWS, MX_K = 16, 128
E4M3_ONE, E2M1_ONE, E8M0_ONE = 0x38, 2, 127


def operand(matrix: np.ndarray, bits: int) -> np.ndarray:
    """A, or B transposed, as registers: codes [grid, 16, 128], in order of *position* -> int32 [grid, 64, 8].

    Position p of row i is item p % 32 of lane i + 16 * (p // 32): which k that is, is what the probes ask for 8-bit items; of 4-bit items it
    is k = p (Guide, section 7.1.4).
    """
    grid = len(matrix)
    lanes = matrix.reshape(grid, ROWS, 4, 32).transpose(0, 2, 1, 3).reshape(grid, LANES, 32)
    return pack(lanes, bits, 8).view(np.int32)


def result_matrix(words: np.ndarray) -> np.ndarray:
    """D as float32 [.., 16, 16]: item r of lane l is row 4 * (l / 16) + r, column l % 16 (Guide, section 7.1.4). words: uint32 [.., 64, 4]."""
    parts = words.view(np.float32).reshape(*words.shape[:-2], 4, ROWS, 4)
    return np.moveaxis(parts, -1, -2).reshape(*words.shape[:-2], ROWS, ROWS)


def _scales(grid: int, code: int | np.ndarray = E8M0_ONE) -> np.ndarray:
    return np.ascontiguousarray(np.broadcast_to(np.asarray(code, np.uint32), (grid, LANES)))


def _positions_to_k(bits: int) -> np.ndarray:
    """k of each position: 4-bit items in order; 8-bit items in two runs of 16, 64 apart (Guide, register tables of section 7.1.4)."""
    position = np.arange(MX_K)
    group, item = position // 32, position % 32
    return position if bits == 4 else 64 * (item // 16) + 16 * group + item % 16


def _matrix_launch(a_bits: int, b_bits: int, a: np.ndarray, b: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray) -> dict[str, Any]:
    names = {8: "e4m3", 4: "e2m1"}
    arrays = {"a": operand(a, a_bits), "b": operand(b, b_bits), "scale_a": scale_a, "scale_b": scale_b}
    return {"kernel": f"probe_mfma_{names[a_bits]}_{names[b_bits]}", "grid": len(a), "arrays": arrays, "result": (len(a), LANES, 4)}


def _one_a_row(grid: int, position: np.ndarray, code: int | np.ndarray) -> np.ndarray:
    """[grid, 16, 128]: row i of workgroup w is zero but for `code` at position[w, i]."""
    matrix = np.zeros((grid, ROWS, MX_K), np.int64)
    np.put_along_axis(matrix, position[..., None], np.broadcast_to(np.asarray(code), position.shape)[..., None], axis=-1)
    return matrix


def k_order(side: str) -> Experiment:
    """A single 1 at each position of the 8-bit operand, against a 4-bit operand whose first 7 columns are the binary digits of k."""
    grid = MX_K // ROWS
    single = _one_a_row(grid, np.arange(MX_K).reshape(grid, ROWS), E4M3_ONE)
    digits = np.zeros((grid, ROWS, MX_K), np.int64)
    digits[:, :7] = (np.arange(MX_K) >> np.arange(7)[:, None] & 1) * E2M1_ONE
    digits[:, 7] = E2M1_ONE  # a control: every position has some k

    def read(words: np.ndarray) -> np.ndarray:
        product = result_matrix(words)
        product = (product if side == "a" else product.swapaxes(-1, -2)).reshape(MX_K, ROWS)
        k = (product[:, :7] * 2.0 ** np.arange(7)).sum(axis=1).astype(np.int64)
        return np.where(product[:, 7] == 1.0, k, -1)

    launch = _matrix_launch(8, 4, single, digits, _scales(grid), _scales(grid))
    if side == "b":
        launch = _matrix_launch(4, 8, digits, single, _scales(grid), _scales(grid))
    return Experiment(
        **launch, read=read, assumed=_positions_to_k(8), axes=("position (32 × lane group + byte)",),
        alternatives={"lane group g holds k = 32g .. 32g + 31 in one run": np.arange(MX_K)},
    )  # fmt: skip


def scale_lane(side: str, bits: int) -> Experiment:
    """A single 1 at each position of each row, all ones on the other side, and in each lane a scale that tells the lane."""
    grid = MX_K
    position = (np.arange(grid)[:, None] + np.arange(ROWS)) % MX_K
    single = _one_a_row(grid, position, E4M3_ONE if bits == 8 else E2M1_ONE)
    ones = np.full((grid, ROWS, MX_K), E2M1_ONE)
    telling = _scales(grid, E8M0_ONE - 32 + np.arange(LANES))

    def read(words: np.ndarray) -> np.ndarray:
        product = result_matrix(words)
        product = product if side == "a" else product.swapaxes(-1, -2)
        with np.errstate(divide="ignore", invalid="ignore"):
            lane = np.log2(product.astype(np.float64)) + 32
        same = (lane == lane[..., :1]).all(axis=-1) & np.isfinite(lane[..., 0])
        found = np.full((ROWS, MX_K), -1.0)
        found[np.arange(ROWS), position] = np.where(same, lane[..., 0], -1)
        return found.astype(np.int64)

    row, k = np.arange(ROWS)[:, None], _positions_to_k(bits)
    arguments = (bits, 4, single, ones, telling, _scales(grid)) if side == "a" else (4, bits, ones, single, _scales(grid), telling)
    return Experiment(
        **_matrix_launch(*arguments), read=read, assumed=row + 16 * (k // 32), axes=("row" if side == "a" else "column", "position"),
        alternatives={"a lane's own scale counts for its own items": np.broadcast_to(row + 16 * (np.arange(MX_K) // 32), (ROWS, MX_K))},
    )  # fmt: skip


def scale_bytes() -> Experiment:
    """Four different scales in each lane: byte n of A's is 2**n, byte n of B's 2**(4n)."""
    single = _one_a_row(1, np.zeros((1, ROWS), np.int64), E2M1_ONE)
    byte = np.arange(4)
    scale_a, scale_b = (int(((E8M0_ONE + step * byte) << 8 * byte).sum()) for step in (1, 4))
    launch = _matrix_launch(4, 4, single, np.full((1, ROWS, MX_K), E2M1_ONE), _scales(1, scale_a), _scales(1, scale_b))
    launch |= {"kernel": "probe_scale_bytes", "result": (1, LANES, 4, 4)}

    def read(words: np.ndarray) -> np.ndarray:
        product = result_matrix(words[0].swapaxes(0, 1)).reshape(4, -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.log2(product.astype(np.float64))
        usable = (product == product[:, :1]).all(axis=1) & np.isfinite(found[:, 0])
        digits = np.where(usable, found[:, 0], -1).astype(np.int64)
        return np.stack([digits % 4, digits // 4], axis=1)

    return Experiment(**launch, read=read, assumed=np.stack([byte, 3 - byte], axis=1), axes=("selection", "operand (A, B)"))


def scale_codes() -> Experiment:
    """Each E8M0 code c of 1 .. 254 on A's side: against 254 - c (at least 1) on the other side, and alone, where it is 2**(c - 127)."""
    code = np.arange(256).reshape(16, ROWS)
    both = np.concatenate([code, code])
    single = _one_a_row(32, np.zeros((32, ROWS), np.int64), E2M1_ONE)
    ones = np.full((32, ROWS, MX_K), E2M1_ONE)
    # One code a workgroup on B's side: only the diagonal pairs c with 254 - c.
    partner = np.concatenate([np.maximum(254 - code, 1), np.full_like(code, E8M0_ONE)])
    launch = _matrix_launch(4, 4, single, ones, _scales(32, np.tile(both, 4)), _scales(32, np.tile(partner, 4)))

    def read(words: np.ndarray) -> np.ndarray:
        diagonal = result_matrix(words)[:, np.arange(ROWS), np.arange(ROWS)].reshape(2, 256)
        return np.stack([diagonal[0, 1:255], diagonal[1, 1:255]])

    plain = np.ldexp(1.0, np.arange(1, 255) - 127)
    against = np.ones(254)
    against[253] = 2.0  # code 254 against 1
    return Experiment(**launch, read=read, assumed=np.stack([against, plain]).astype(np.float32), axes=("way", "code - 1"))


def scale_code_0() -> Experiment:
    single = _one_a_row(1, np.zeros((1, ROWS), np.int64), E2M1_ONE)
    launch = _matrix_launch(4, 4, single, np.full((1, ROWS, MX_K), E2M1_ONE), _scales(1, 0), _scales(1, 254))
    return Experiment(
        **launch, read=lambda words: result_matrix(words)[0], assumed=np.ones((ROWS, ROWS), np.float32), axes=("row", "column"),
        alternatives={"code 0 is the number 0": np.zeros((ROWS, ROWS), np.float32)},
    )  # fmt: skip


def scale_nan() -> Experiment:
    """NaN scales for a block with data in row 3 and column 5, and for one of zeros in row 7."""
    lanes_a, lanes_b = np.full(LANES, E8M0_ONE), np.full(LANES, E8M0_ONE)
    lanes_a[3] = lanes_a[7 + 16 * 2] = lanes_b[5] = 255
    single = _one_a_row(1, np.zeros((1, ROWS), np.int64), E2M1_ONE)
    launch = _matrix_launch(4, 4, single, np.full((1, ROWS, MX_K), E2M1_ONE), _scales(1, lanes_a), _scales(1, lanes_b))
    assumed = np.ones((ROWS, ROWS), np.float32)
    assumed[[3, 7]] = assumed[:, 5] = np.nan
    return Experiment(**launch, read=lambda words: result_matrix(words)[0], assumed=assumed, axes=("row", "column"))


def mfma_values(bits: int) -> Experiment:
    """Every code of a format times 1."""
    codes = np.arange(1 << bits).reshape(-1, ROWS)
    grid = len(codes)
    single = _one_a_row(grid, np.zeros((grid, ROWS), np.int64), codes)
    ones = np.full((grid, ROWS, MX_K), E2M1_ONE)
    values = (E4M3_VALUES if bits == 8 else E2M1_VALUES) + 0.0  # adding to the accumulator's +0 takes the sign from -0
    return Experiment(
        **_matrix_launch(bits, 4, single, ones, _scales(grid), _scales(grid)), read=lambda words: result_matrix(words)[..., 0].reshape(-1),
        assumed=values.astype(np.float32), axes=("code",),
    )  # fmt: skip


def _bf16_products(a: np.ndarray, b: np.ndarray, c: np.ndarray, assumed: np.ndarray) -> Experiment:
    """D[i][j] = a[i] * b[j] + c[i][j]: a, b float32 [16], exact in bf16; c float32 [16, 16]."""

    def column(values: np.ndarray) -> np.ndarray:
        items = np.zeros((1, LANES, 8), np.uint16)
        items[0, :ROWS, 0] = values.astype(np.float32).view(np.uint32) >> np.uint32(16)
        return items

    lanes = c.astype(np.float32).reshape(4, 4, ROWS).transpose(0, 2, 1).reshape(1, LANES, 4)
    return Experiment(
        kernel="probe_mfma_bf16", grid=1, arrays={"a": column(a), "b": column(b), "c": np.ascontiguousarray(lanes)}, result=(1, LANES, 4),
        read=lambda words: result_matrix(words)[0], assumed=assumed, axes=("row", "column"),
    )  # fmt: skip


def mfma_denormals() -> Experiment:
    """Powers of two on both sides of 2**-126, whose products are exact in f32 or far below it; the accumulator is denormal in half the columns."""
    a = 2.0 ** np.array([-133, -132, -130, -128, -127, -126, -125, -100, -60, -30, -1, 0, 1, 30, 60, 63.0])
    b = 2.0 ** np.array([0, 1, -1, 2, -2, 10, 20, 30, 50, 60, -60, -100, -110, -126, -130, -133.0])
    product = np.outer(a, b)
    product[product < 2.0**-152] = 0.0
    b = np.where((product != 0) & (product < 2.0**-149), 0.0, 1.0).min(axis=0) * b  # no column with a product that would have to be rounded
    c = np.zeros((ROWS, ROWS))
    c[:, 1::2] = 2.0**-140
    exact = np.outer(a, b)
    exact[exact < 2.0**-152] = 0.0
    c[exact >= 2.0**-118] = 0.0  # else the sum would have to be rounded
    return _bf16_products(a, b, c, (exact + c).astype(np.float32))


def mfma_nonfinite() -> Experiment:
    infinity, nan, large = np.inf, np.nan, 2.0**127
    a = np.array([1, infinity, -infinity, nan, 0, large, -large, 2, 1, 1, 1, 1, 1, 1, 1, 1.0])
    b = np.array([1, 0, 2, infinity, -infinity, nan, large, -1, 1, 1, 1, 1, 1, 1, 1, 1.0])
    c = np.zeros((ROWS, ROWS))
    c[:, 8], c[:, 9], c[:, 10] = infinity, -infinity, nan
    with np.errstate(invalid="ignore", over="ignore"):
        exact = (np.outer(a, b) + c).astype(np.float32)  # the other 31 products of each element are 0 * 0: they leave it as it is
    return _bf16_products(a, b, c, exact)
