"""What a recipe will do and need, from config.json alone: no weights and no data are read.

Mistakes that would only show at the end of a run (a group size that does not fit, an ignore pattern that matches
nothing) are found here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from compress.arch import HEAD, ModelSpec
from compress.cost import WalkCost, walk_cost
from compress.errors import UserError
from compress.kernels.packing import packed_words
from compress.quant.scheme import Scheme
from compress.recipe import QuantizeSettings, Recipe
from compress.roofline import HARDWARE, Prediction, measure_flops, parameters, predict
from compress.stages import chosen_schemes, scale_dtype

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
ACHIEVED = 0.7  # share of the probe's rate that the whole walk reaches
SPEED_HARDWARE = ("4090", "l40s", "h100")
SPEED_BATCHES = (1, 32)
SPEED_CONTEXT = 1024


@dataclass(frozen=True)
class LayerForecast:
    """One linear: `scheme` is None where it is kept as it is. A head tied to the embedding has that tensor's bytes."""

    name: str
    shape: tuple[int, int]  # [out, in]
    scheme: Scheme | None
    tied: bool
    bits_per_weight: float
    stored_bytes: int


@dataclass(frozen=True)
class SpeedForecast:
    """Decode on one device at SPEED_CONTEXT tokens of context, by batch size: the roofline, now and as planned."""

    title: str
    baseline: dict[int, Prediction]
    compressed: dict[int, Prediction]

    def ratio(self, batch: int) -> float:
        return self.baseline[batch].tpot_ms / self.compressed[batch].tpot_ms


@dataclass(frozen=True)
class Forecast:
    """The plan of one quantize stage. Sizes in bytes."""

    model: str
    layers: list[LayerForecast]
    parameters: int
    baseline_bytes: int
    compressed_bytes: int
    cost: WalkCost
    flops_per_second: float
    speed: list[SpeedForecast]

    @property
    def bits_per_weight(self) -> float:
        """Of the whole file: embedding, norms, scales and padding included."""
        return 8 * self.compressed_bytes / self.parameters

    @property
    def dense_bytes(self) -> int:
        """Of the compressed checkpoint: embedding, norms, biases and the linears that are kept."""
        return self.compressed_bytes - sum(layer.stored_bytes for layer in self.layers if layer.scheme)

    @property
    def seconds(self) -> float:
        return self.cost.flops / (ACHIEVED * self.flops_per_second)


def forecast(spec: ModelSpec, recipe: Recipe, gflops: float | None = None) -> Forecast:
    """Check the recipe's quantize stage against the model and price it.

    `gflops` is the rate of dense products of the device that will do the work; None probes this CPU for 0.3 s.
    Raises UserError for a group size that does not fit, an ignore pattern without a match, an unknown width.
    """
    where, settings = _quantize_stage(recipe)
    schemes = chosen_schemes(spec, settings, where)
    element = DTYPE_BYTES.get(spec.dtype, 4)
    scale_bytes = scale_dtype(settings, spec).itemsize
    layers = [_layer(spec, name, schemes.get(name), element, scale_bytes) for name in spec.linears()]
    baseline = parameters(spec) * element
    return Forecast(
        model=recipe.model,
        layers=layers,
        parameters=parameters(spec),
        baseline_bytes=baseline,
        compressed_bytes=_compressed_bytes(spec, layers, element),
        cost=walk_cost(spec, settings, recipe.calibration, sum(layer.stored_bytes for layer in layers if layer.scheme)),
        flops_per_second=1e9 * gflops if gflops else measure_flops(),
        speed=[_speed(spec, schemes, name) for name in SPEED_HARDWARE],
    )


def packed_bytes(shape: tuple[int, int], scheme: Scheme, scale_bytes: int) -> int:
    """Bytes of one linear [out, in] in compressed-tensors' pack-quantized layout.

    Codes lie in int32 words along a row, zero points along a column; the shape is stored as two int64.
    """
    rows, columns = shape
    groups = scheme.groups(columns)
    codes = rows * packed_words(columns, scheme.bits) * 4
    zeros = 0 if scheme.symmetric else packed_words(rows, scheme.bits) * groups * 4
    return codes + rows * groups * scale_bytes + zeros + 16


def _quantize_stage(recipe: Recipe) -> tuple[str, QuantizeSettings]:
    for index, stage in enumerate(recipe.stages):
        if isinstance(stage.settings, QuantizeSettings):
            return f"stages[{index}].quantize", stage.settings
    raise UserError("stages: a forecast needs a quantize stage")


def _layer(spec: ModelSpec, name: str, scheme: Scheme | None, element: int, scale_bytes: int) -> LayerForecast:
    shape = spec.linears()[name]
    weights = math.prod(shape)
    size = packed_bytes(shape, scheme, scale_bytes) if scheme else weights * element
    tied = spec.tied and name == HEAD and scheme is None
    return LayerForecast(name, shape, scheme, tied, 8 * size / weights, size)


def _compressed_bytes(spec: ModelSpec, layers: list[LayerForecast], element: int) -> int:
    """Quantized linears as packed, every other tensor as it was; a tied head that is quantized is stored beside the
    embedding, which stays."""
    packed = {f"{layer.name}.weight": layer.stored_bytes for layer in layers if layer.scheme}
    dense = {name: math.prod(shape) * element for name, shape in spec.tensors().items() if name not in packed}
    return sum(packed.values()) + sum(dense.values())


def _speed(spec: ModelSpec, schemes: Mapping[str, Scheme], name: str) -> SpeedForecast:
    hardware = HARDWARE[name]

    def by_batch(chosen: Mapping[str, Scheme]) -> dict[int, Prediction]:
        return {batch: predict(spec, chosen, hardware, batch, SPEED_CONTEXT) for batch in SPEED_BATCHES}

    return SpeedForecast(hardware.title, by_batch({}), by_batch(schemes))
