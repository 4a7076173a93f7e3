"""The specification of an attention operator: a frozen, validated record, with TOML and inline
forms.

    spec = AttentionSpec.make(variant="gqa", heads=32, kv_heads=8, causal=True)

Every error is a line that names the field, says what is wrong and how to fix it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

MAX_HEADS = 65535  # a CUDA grid's y and z extent
MAX_V_DIM = 512  # a wider row of the accumulator fits no GPU's registers
MAX_HEAD_DIM = 576  # a wider row of Q leaves no shared memory for keys
MAX_INT = 2**31 - 1  # kernels index with 32-bit integers
LONGEST_SLUG = 80  # characters of a folder's name
FLOAT_RANGE = (1e-30, 1e30)  # kernels hold these numbers in fp32

MOST_QUERIES = 128  # of a decode; for more there are packed queries

RUN_TIME_DIMS = ("batch", "heads", "kv_heads", "q_len", "kv_len")
_ALWAYS_DUMPED = ("variant", "heads", "kv_heads", "head_dim", "dtype")
_PYTHON = r"[^\0\ud800-\udfff]*\.py(:[A-Za-z_][A-Za-z0-9_]*)?"
_TEXT_FIELDS = ("variant", "dtype", "kv_dtype", "branch", "reference")
_SEQUENCES = ("packed", "decode", "unsplit", "cache", "page")
"""The fields that say how sequences lie."""
_NO_KERNEL = (
    "'all' is several kernels: name one branch. `flashwright bench --table 9` measures all, and "
    "flashwright.nsa computes them"
)
"""Why a spec for one kernel cannot have all branches."""
_REPEATABLE = {True: "repeatable to the bit", False: "not repeatable to the bit"}


class BadSpec(ValueError):
    """An invalid specification; `lines` has one error each."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@dataclass(frozen=True)
class Batch:
    """How sequences of any lengths lie in memory."""

    queries: bool = True
    """Whether queries are packed; else all sequences have `q_len` of them."""
    lengths: bool = False
    """Whether `LengthsK` says how many keys a sequence has, of those up to the next one's start."""
    page: int | None = None
    """The positions in a page, if keys lie in pages; `LengthsK` says how many a sequence has."""
    decode: int | None = None
    """The most queries that a sequence has, where these are few."""
    unsplit: bool = False
    """Whether one thread block has all keys of a sequence, where queries are few."""


class AttentionSpec(BaseModel):
    """One attention operator. Sizes that change from call to call (lengths, batch) are not here."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    variant: str
    """A free name: mha, gqa, mla, or your own."""
    heads: int = 32
    """Heads of Q and O."""
    kv_heads: int = 32
    """Heads of K and V; the query heads share them in equal groups. Default: heads."""
    head_dim: int = 128
    """Columns of Q and K."""
    v_dim: int | None = None
    """Columns of V and O. None: head_dim."""
    latent: bool = False
    """V is the first v_dim columns of K, as in MLA's latent cache: there is no tensor V."""
    dtype: Literal["fp16", "bf16", "fp8"] = "fp16"
    """The type of Q, K, V and O; fp8 means e4m3 inputs and a bf16 output."""
    kv_dtype: Literal["fp8", "int8"] | None = None
    """The type of K and V if they have another one than Q, as in a cache; fp8 means e4m3. They are
    multiplied by inputs `KDescale` and `VDescale` (batch, kv_heads) fp32, with `latent` by the
    first alone. None: dtype."""
    causal: bool = False
    """Query q_idx sees key kv_idx when kv_idx <= q_idx + kv_len - q_len."""
    window: int | None = None
    """Sliding window: position p = q_idx + kv_len - q_len sees key k when |p - k| < window
    (and k <= p when causal)."""
    sink_tokens: int | None = None
    """With a window: the number of first keys that every query sees (k <= p when causal)."""
    softcap: float | None = None
    """c: a score s becomes c * tanh(s / c)."""
    alibi: bool = False
    """Adds slope_h * (kv_idx - p); input `Slopes` (heads) fp32."""
    sink: bool = False
    """One logit per head that joins the denominator and has no value; input `Sink` (heads) fp32."""
    scale: float | None = None
    """The factor on Q K^T. None: 1 / sqrt(head_dim)."""
    lse: bool = True
    """Whether the kernel also returns the log-sum-exp of each row."""
    backward: bool = False
    """Whether the program computes the gradients of this attention: inputs are also `O`, `LSE` and
    the gradient `dO`; outputs `dQ`, `dK`, `dV` and, if the program has them, `dSink`, `dSlopes`."""
    branch: Literal["compressed", "selected", "window", "all"] | None = None
    """Which branch of native sparse attention (NSA) this is; None: not NSA. `all` is the sum of the
    three, each times its gate, with blocks chosen by the means of keys: several kernels, which
    flashwright.nsa calls. Such a spec is for benchmarks and their records."""
    block: int = 32
    """NSA: tokens in one compressed block."""
    stride: int = 16
    """NSA: tokens between the starts of two compressed blocks."""
    selected_block: int = 64
    """NSA: tokens in one selected block."""
    top_k: int = 16
    """NSA: selected blocks per query."""
    packed: bool = False
    """Sequences have any lengths and lie behind each other: Q is (heads, tokens, dim), and
    `StartsQ` (batch + 1) says where each begins. So do K and V, by `StartsK`, unless they lie in a
    cache or in pages."""
    decode: int | None = None
    """Sequences have few queries, at most so many each, and their keys lie in a cache or in pages.
    The dim `splits` says how many thread blocks share the keys of a sequence."""
    unsplit: bool = False
    """With `decode`: one thread block has all keys of a sequence, and there is no dim `splits`."""
    cache: bool = False
    """K and V have room for more keys: (kv_heads, tokens, dim). `StartsK` (batch) says where those
    of each sequence begin, `LengthsK` (batch) how many there are."""
    page: int | None = None
    """Positions in a page: K and V are (pages, kv_heads, positions, dim). Row b of `Table` names
    the pages of sequence b, `LengthsK` (batch) says how many keys it has."""
    reference: str | None = None
    """A Python file with a function that computes the expected output, as FILE.py or
    FILE.py:function. The path is relative to the spec's file."""
    tolerance: float | None = None
    """Allowed error relative to the output's RMS. None: what the dtype allows."""
    repeatable: bool = True
    """Whether the same inputs must give the same bits. False: two runs may differ by at most half
    of the allowed error, as with atomic additions. Default in a backward pass: false, and even then
    dK and dV have the same bits."""
    dims: dict[str, int] = Field(default_factory=dict)
    """Extra run-time dims of a custom program."""

    @classmethod
    def make(cls, **settings: object) -> Self:
        """A spec from settings; raises BadSpec with readable lines."""
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise BadSpec(*problems(error)) from None

    def __hash__(self) -> int:  # the generated one fails on the dict
        return hash((*(v for k, v in self if k != "dims"), *sorted(self.dims.items())))

    @property
    def input_dtype(self) -> Literal["fp16", "bf16", "e4m3"]:
        """The element type of Q, K and V."""
        return "e4m3" if self.dtype == "fp8" else self.dtype

    @property
    def key_dtype(self) -> Literal["fp16", "bf16", "e4m3", "int8"]:
        """The element type of K and V."""
        if self.kv_dtype is None:
            return self.input_dtype
        return "e4m3" if self.kv_dtype == "fp8" else self.kv_dtype

    @property
    def scales(self) -> dict[str, str]:
        """The inputs that K and V are multiplied by, if they have a type of their own."""
        if self.kv_dtype is None:
            return {}
        return {"K": "KDescale"} if self.latent else {"K": "KDescale", "V": "VDescale"}

    @property
    def output_dtype(self) -> Literal["fp16", "bf16"]:
        """The element type of O: the spec's dtype, or bf16 for fp8."""
        return "bf16" if self.dtype == "fp8" else self.dtype

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def value_dim(self) -> int:
        """Columns of V and O."""
        return self.head_dim if self.v_dim is None else self.v_dim

    def values(self, tensors: Mapping[str, Any]) -> Any:
        """V among the tensors of a call: with `latent` the first columns of K."""
        return tensors["K"][..., : self.value_dim] if self.latent else tensors["V"]

    @property
    def softmax_scale(self) -> float:
        """The factor on Q K^T."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def batch(self) -> Batch | None:
        """How sequences of any lengths lie; None for rectangular batches."""
        kept = self.cache or self.decode is not None or self.page is not None
        found = Batch(self.packed, kept, self.page, self.decode, self.unsplit)
        return found if self.packed or kept else None

    @property
    def each(self) -> Self:
        """The spec of one sequence alone."""
        rectangular = {"packed": False, "decode": None, "cache": False, "page": None}
        return self.model_copy(update={**rectangular, "unsplit": False})

    def of_sequences(self, batch: Batch) -> Self:
        """The spec of this attention where sequences lie so."""
        known = batch.page is not None or batch.decode is not None
        lie = {"packed": batch.queries, "cache": batch.lengths and not known}
        lie["unsplit"] = batch.unsplit
        return self.model_copy(update={**lie, "page": batch.page, "decode": batch.decode})

    @property
    def in_words(self) -> str:
        """A description in words, for messages and reports."""
        heads = f"{self.heads} heads"
        if self.kv_heads != self.heads:
            shared = "one KV head" if self.kv_heads == 1 else f"{self.kv_heads} KV heads"
            heads = f"{self.heads} query heads on {shared}"
        width = f"head dim {self.head_dim}"
        if self.value_dim != self.head_dim:
            width += f" (V {self.value_dim})"
        extras = [
            self._branch_in_words,
            self._mask_in_words,
            self._window_in_words,
            f"softcap {_exact(self.softcap)}" if self.softcap is not None else "",
            "ALiBi" if self.alibi else "",
            "sink logit" if self.sink else "",
            f"scale {_exact(self.scale)}" if self.scale is not None else "",
            "" if self.lse else "no log-sum-exp",
            self._batch_in_words,
            "V the first columns of K" if self.latent else "",
            "backward" if self.backward else "",
            "" if self._is_usual("repeatable") else _REPEATABLE[self.repeatable],
        ]
        dtype: str = "fp8 in, bf16 out" if self.dtype == "fp8" else self.dtype
        dtype += f", K and V in {self.kv_dtype}" if self.kv_dtype is not None else ""
        return ", ".join(filter(None, [*extras, heads, width, dtype]))

    @property
    def _branch_in_words(self) -> str:
        if self.branch == "all":
            return "NSA's three branches with gates"
        return f"NSA's {self.branch} branch" if self.branch is not None else ""

    @property
    def _batch_in_words(self) -> str:
        if self.batch is None:
            return ""
        queries = "packed sequences" if self.packed else "sequences of any number of keys"
        if self.decode is not None:
            one = self.decode == 1
            queries = "decode of 1 query" if one else f"decode of up to {self.decode} queries"
            queries += ", keys not split" if self.unsplit else ""
        if self.page is not None:
            return f"{queries}, keys in pages of {self.page}"
        return f"{queries}, keys in a cache" if self.batch.lengths else queries

    @property
    def _mask_in_words(self) -> str:
        """Which keys a query sees; with a reference the function says so."""
        told = [f"judged by {self.reference}"] if self.reference is not None else []
        if self.causal:
            told.append("causal")
        elif not told and self.window is None:
            told.append("every key visible")
        return ", ".join(told)

    @property
    def _window_in_words(self) -> str:
        if self.window is None:
            return ""
        told = f"window of {self.window}" + ("" if self.causal else " to both sides")
        tokens = self.sink_tokens
        return told + (f", {tokens} sink token{'s' * (tokens > 1)}" if tokens else "")

    @property
    def slug(self) -> str:
        """A name for a folder, which another operator does not share: the variant, and what
        differs from a variant's defaults."""
        heads = f"h{self.heads}" + (f"x{self.kv_heads}" if self.kv_heads != self.heads else "")
        width = f"d{self.head_dim}" + (f"x{self.v_dim}" if self.v_dim is not None else "")
        parts = [self.variant, "causal" if self.causal else "", heads, width, self.dtype]
        own = {"variant", "causal", "heads", "kv_heads", "head_dim", "v_dim", "dtype"}
        for name in type(self).model_fields:
            if name not in own and not self._is_usual(name):
                parts.append(_part(name, getattr(self, name)))
        text = "-".join(filter(None, parts))
        return text if len(text) <= LONGEST_SLUG else f"{text[:LONGEST_SLUG]}-{_short_digest(self)}"

    def repeats(self, output: str) -> bool:
        """Whether two runs with the same inputs must give the same bits of an output."""
        return self.repeatable or (self.backward and output in ("dK", "dV"))

    def differentiated(self, deterministic: bool = False) -> Self:
        """The spec of this attention's backward pass; a `deterministic` one has the same bits of dQ
        in every run."""
        return self.model_copy(update={"backward": True, "repeatable": deterministic})

    def attention(self) -> Self:
        """The spec of the attention whose backward pass this is; it gives the log-sum-exp."""
        return self.model_copy(update={"backward": False, "repeatable": True, "lse": True})

    def compressed_blocks(self, tokens: int) -> int:
        """How many whole compressed blocks `tokens` tokens make (NSA)."""
        return max(0, (tokens - self.block) // self.stride + 1)

    @model_validator(mode="before")
    @classmethod
    def _name_it(cls, data: object) -> object:
        """What a reference says needs no variant's name."""
        if isinstance(data, dict) and data.get("reference") and "variant" not in data:
            return {**data, "variant": "custom"}
        return data

    @model_validator(mode="before")
    @classmethod
    def _share_nothing(cls, data: object) -> object:
        """Default kv_heads to heads."""
        if isinstance(data, dict) and "kv_heads" not in data:
            heads = data.get("heads")
            if isinstance(heads, int) and 1 <= heads <= MAX_HEADS:  # else its own line is enough
                return {**data, "kv_heads": heads}
        return data

    @model_validator(mode="before")
    @classmethod
    def _sum_in_any_order(cls, data: object) -> object:
        """Default `repeatable` to false in a backward pass."""
        if isinstance(data, dict) and data.get("backward") is True and "repeatable" not in data:
            return {**data, "repeatable": False}
        return data

    def _is_usual(self, name: str) -> bool:
        """Whether a field has its default."""
        value = getattr(self, name)
        if name == "repeatable":
            return bool(value) is not self.backward
        usual = type(self).model_fields[name].get_default(call_default_factory=True)
        return bool(value == usual)

    @model_serializer(mode="wrap")
    def _as_recorded(self, dumped: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The record without fields that earlier versions lack, if they have their default."""
        found: dict[str, Any] = dumped(self)
        for name in ("repeatable", "backward", "kv_dtype", "latent", *_SEQUENCES):
            if self._is_usual(name):
                found.pop(name, None)
        return found

    @field_validator("variant")
    @classmethod
    def _variant(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}", value):
            raise _wrong(f"{value[:64]!r} is not a name: use letters, digits, '_', '-', '.' or '+'")
        return value

    @field_validator("heads", "kv_heads")
    @classmethod
    def _heads(cls, value: int, info: ValidationInfo) -> int:
        _check_count(value, MAX_HEADS)
        heads = info.data.get("heads")
        if info.field_name == "kv_heads" and heads is not None and heads % value:
            raise _wrong(
                f"kv heads ({value}) must divide the query heads ({heads}): "
                f"use {_divisors(heads, value)}"
            )
        return value

    @field_validator("head_dim", "v_dim")
    @classmethod
    def _width(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is None:
            return None
        most = MAX_V_DIM if info.field_name == "v_dim" else MAX_HEAD_DIM
        if value < 1:
            raise _wrong(f"must be at least 8, not {value}: use a multiple of 8 such as 64 or 128")
        if value > most:
            raise _wrong(f"must be at most {most}, not {_shown(value)}")
        if value % 8:
            below = value // 8 * 8
            choice = f"{below} or {below + 8}" if below else "8"
            raise _wrong(f"must be a multiple of 8, not {value}: use {choice}")
        return value

    @field_validator("decode")
    @classmethod
    def _queries(cls, value: int | None) -> int | None:
        if value is not None:
            _check_count(value, MOST_QUERIES)
        return value

    @field_validator(
        *("window", "sink_tokens", "block", "stride", "selected_block", "top_k", "page")
    )
    @classmethod
    def _count(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None:
            hint = ": leave it out for no window" if info.field_name == "window" else ""
            _check_count(value, MAX_INT, hint)
        return value

    @field_validator("softcap", "scale")
    @classmethod
    def _factor(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is None or FLOAT_RANGE[0] <= value <= FLOAT_RANGE[1]:
            return value
        if value <= 0:
            without = "no softcap" if info.field_name == "softcap" else "1 / sqrt(head_dim)"
            raise _wrong(f"must be above 0, not {value:g}: leave it out for {without}")
        raise _wrong(f"must lie between 1e-30 and 1e30, not {value:g}: the kernel holds it in fp32")

    @field_validator("tolerance")
    @classmethod
    def _tolerance(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value < 1:
            raise _wrong(
                f"must lie between 0 and 1, not {value:g}: it is relative to the output's RMS, "
                "and 1 would accept zeros"
            )
        return value

    @field_validator("reference")
    @classmethod
    def _reference(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(_PYTHON, value, re.DOTALL):
            raise _wrong(f"{value[:64]!a} is not a Python file: give the path of a .py file")
        return value

    @field_validator("dims")
    @classmethod
    def _dims(cls, value: dict[str, int]) -> dict[str, int]:
        for name, size in value.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise _wrong(f"{name[:64]!r} is not a name: use letters, digits and '_'")
            if name in RUN_TIME_DIMS:
                raise _wrong(f"{name} is always there: leave it out of dims")
            if not 1 <= size <= MAX_INT:
                raise _wrong(f"{name} must lie between 1 and {MAX_INT}, not {_shown(size)}")
        return value

    @model_validator(mode="after")
    def _branches(self) -> Self:
        if self.stride > self.block:
            raise _wrong(
                f"stride ({self.stride}) must not exceed block ({self.block}), which skips tokens: "
                f"use {self.block} or less",
                "stride",
            )
        if self.sink_tokens is not None and self.window is None:
            fix = "add window = 512, or leave it out (a logit that joins the softmax is sink)"
            raise _wrong(f"changes nothing without a window: {fix}", "sink_tokens")
        if self.branch in ("window", "all") and self.window is None:
            raise _wrong(f"branch '{self.branch}' needs its width: add window = 512", "window")
        if self.branch == "all" and not self.block == self.stride == self.selected_block:
            same = "block, stride and selected_block must be one number"
            raise _wrong(f"blocks are chosen by their own means: {same}", "block")
        if self.branch in ("compressed", "selected") and self.window is not None:
            raise _wrong(f"branch '{self.branch}' has no window: remove it", "window")
        if self.branch == "compressed" and self.alibi:
            raise _wrong("compressed blocks have no token position: set alibi = false", "alibi")
        if self.branch in ("selected", "all") and not self.causal:
            raise _wrong(f"branch '{self.branch}' never looks ahead: set causal = true", "causal")
        if self.backward and self.dtype == "fp8":
            raise _wrong('gradients have no fp8: set dtype = "bf16" or "fp16"', "backward")
        if self.kv_dtype is not None:
            self._check_kv_dtype()
        if self.value_dim > MAX_V_DIM:
            text = f"must be at most {MAX_V_DIM}, not {self.head_dim}"
            raise _wrong(f"{text}, where V is as wide: set v_dim", "head_dim")
        if self.latent:
            self._check_latent()
        return self

    def _check_latent(self) -> None:
        if self.value_dim >= self.head_dim:
            raise _wrong("V is the first columns of K: set v_dim below head_dim", "latent")
        for wrong, why in (
            (self.backward, "gradients have a V of their own"),
            (self.branch is not None, "native sparse attention has a V of its own"),
            (self.dtype == "fp8", "V is the first columns of K beside a 16-bit Q"),
            (self.window is not None, "MLA has no window"),
        ):
            if wrong:
                raise _wrong(f"{why}: leave it out", "latent")

    def _check_kv_dtype(self) -> None:
        if self.dtype == "fp8":
            raise _wrong('goes with a Q of 16 bits: set dtype = "bf16" or "fp16"', "kv_dtype")
        if self.backward:
            raise _wrong("gradients have K and V in dtype: leave it out", "kv_dtype")
        if self.branch is not None:
            raise _wrong(f"branch '{self.branch}' has K and V in dtype: leave it out", "kv_dtype")

    @model_validator(mode="after")
    def _sequences(self) -> Self:
        given = [name for name in _SEQUENCES if not self._is_usual(name)]
        if not given:
            return self
        if self.unsplit and self.decode is None:
            raise _wrong("only a decode splits keys: leave it out", "unsplit")
        if self.packed and self.decode is not None:
            raise _wrong("queries are packed or as many for each sequence: leave one out", "decode")
        if self.cache and (self.decode is not None or self.page is not None):
            other = "decode" if self.decode is not None else "page"
            raise _wrong(f"{other} says that keys lie in a cache: leave it out", "cache")
        for wrong, why in (
            (self.reference is not None, "a reference says how sequences lie"),
            (self.branch is not None, "native sparse attention has rectangular batches"),
            (self.backward, "a backward pass has rectangular batches"),
        ):
            if wrong:
                raise _wrong(f"{why}: leave it out", given[0])
        return self


def scale_of(scale: float | None, head_dim: int) -> float | None:
    """A scale as a spec has it: None for 1 / sqrt(head_dim), however that was rounded."""
    usual = 1 / math.sqrt(head_dim)
    return None if scale is None or math.isclose(scale, usual, rel_tol=1e-9) else scale


def _part(name: str, value: object) -> str:
    """A setting in a folder's name: `alibi`, `no_lse`, `window512`, `judged_by_mine`."""
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    if name == "reference":
        return "judged_by_" + re.sub(r"[^A-Za-z0-9_]+", "_", str(value).replace(".py", ""))
    if isinstance(value, dict):
        return "_".join(f"{key}{size}" for key, size in sorted(value.items()))
    return f"{name}{_exact(value)}" if isinstance(value, float) else f"{name}{value}"


def _short_digest(spec: AttentionSpec) -> str:
    return hashlib.sha256(dump(spec).encode()).hexdigest()[:8]


def _wrong(why: str, field: str = "") -> PydanticCustomError:
    return PydanticCustomError("spec", "{why}", {"why": why, "field": field})


def _shown(value: int) -> str:
    """A number for a message; Python refuses to print integers of thousands of digits."""
    return str(value) if abs(value) < 10**18 else "a number that large"


def _exact(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _check_count(value: int, most: int, hint: str = "") -> None:
    if value < 1:
        raise _wrong(f"must be at least 1, not {_shown(value)}{hint}")
    if value > most:
        raise _wrong(f"must be at most {most}, not {_shown(value)}")


def _divisors(heads: int, near: int) -> str:
    every = [d for d in range(1, heads + 1) if heads % d == 0]
    shown = [str(d) for d in sorted(sorted(every, key=lambda d: abs(d - near))[:8])]
    return " or ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


_PLAIN = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "dict_type": "must be a table of names and whole numbers",
    "finite_number": "must be a finite number",
    "string_unicode": "must be valid Unicode text",
}


def problems(error: ValidationError) -> list[str]:
    """The error as readable lines, each `field: what is wrong, and the fix`."""
    return [f"{field}: {why}" if field else why for field, why in _findings(error)]


def _findings(error: ValidationError) -> list[tuple[str, str]]:
    return [_finding(e) for e in error.errors(include_url=False)]


def _finding(error: ErrorDetails) -> tuple[str, str]:
    field = ".".join(str(part) for part in error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    if kind == "spec":
        return field or str(context["field"]), error["msg"]
    if kind == "missing":
        fix = ': add variant = "mha" (any name)' if field == "variant" else ""
        return field, f"is missing{fix}"
    if kind == "extra_forbidden":
        return field, _unknown(field)
    given = error["input"]
    shown = f", not {_literal(given)}" if isinstance(given, str | bool | float) else ""
    if kind == "literal_error":
        return field, f"must be {context['expected']}{shown}"
    if kind in _PLAIN:
        return field, _PLAIN[kind] + shown
    return field, error["msg"]


def _literal(value: str | bool | float) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)[:64]


def _unknown(name: str) -> str:
    fields = list(AttentionSpec.model_fields)
    close = difflib.get_close_matches(name.lower().replace("-", "_"), fields, n=1, cutoff=0.6)
    if close:
        return f"no such setting: did you mean {close[0]}?"
    return f"no such setting: there are {', '.join(fields)}"


def load(path: str | Path) -> AttentionSpec:
    """The spec in a TOML file. Raises BadSpec with the file, and the line if it is known."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise BadSpec(f"{path}: there is no such file") from None
    except OSError as error:
        raise BadSpec(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or a path with a NUL
        raise BadSpec(f"{path}: is not a text file in UTF-8: {error}") from None
    return parse(text, str(path))


def parse(text: str, source: str = "spec") -> AttentionSpec:
    """The spec in TOML text; `source` names the text in errors. Raises BadSpec."""
    try:
        settings = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        why, line = str(error), re.search(r" \(at line (\d+), column (\d+)\)$", str(error))
        where = f"{source}:{line[1]}:{line[2]}" if line else source
        raise BadSpec(f"{where}: not valid TOML: {why[: line.start()] if line else why}") from None
    try:
        spec = AttentionSpec.model_validate(settings)
    except ValidationError as error:
        found = _findings(error)
        raise BadSpec(*(f"{source}{_line_of(text, f)}: {f}: {why}" for f, why in found)) from None
    if spec.branch == "all":
        raise BadSpec(f"{source}{_line_of(text, 'branch')}: branch: {_NO_KERNEL}")
    return spec


def _line_of(text: str, field: str) -> str:
    key = re.escape(field.split(".")[-1])
    found = re.search(rf"^[ \t]*(?:\w+\.)?[\"']?{key}[\"']?[ \t]*=|^\[{key}\]", text, re.MULTILINE)
    return f":{text.count(chr(10), 0, found.start()) + 1}" if found else ""


def dump(spec: AttentionSpec) -> str:
    """The spec as TOML: the main settings and those that differ from the defaults."""
    lines = []
    for name in AttentionSpec.model_fields:
        if name != "dims" and (name in _ALWAYS_DUMPED or not spec._is_usual(name)):
            lines.append(f"{name} = {_toml(getattr(spec, name))}")
    if spec.dims:
        lines += ["", "[dims]", *(f"{name} = {size}" for name, size in spec.dims.items())]
    return "\n".join(lines) + "\n"


def _toml(value: str | bool | int | float) -> str:
    """A TOML scalar: JSON's, except for DEL, which JSON does not escape."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_inline(text: str) -> dict[str, Any]:
    """Settings from `causal, head-dim=64, dims.pages=4`, to be given to AttentionSpec.make.

    A key alone means true; dashes stand for underscores; `none` unsets.
    """
    settings: dict[str, Any] = {}
    wrong: list[str] = []
    for part in (p.strip() for p in text.split(",")):
        if not part:
            continue
        key, equals, raw = (piece.strip() for piece in part.partition("="))
        name = key.replace("-", "_")
        table: dict[str, Any] = settings
        if name.startswith("dims."):
            table, name = settings.setdefault("dims", {}), name.removeprefix("dims.")
        elif name == "dims":
            wrong.append("dims: give each one as dims.name=4")
            continue
        elif name not in AttentionSpec.model_fields:
            wrong.append(f"{key or part}: {_unknown(key)}")
            continue
        if name in table:
            wrong.append(f"{key}: is given twice")
        elif not raw and (equals or not _is_flag(key)):
            wrong.append(f"{key}: needs a value: write {key}=...")
        else:
            table[name] = _value(raw, text=name in _TEXT_FIELDS) if equals else True
    if settings.get("branch") == "all":
        wrong.append(f"branch: {_NO_KERNEL}")
    if wrong:
        raise BadSpec(*wrong)
    return settings


def _is_flag(key: str) -> bool:
    field = AttentionSpec.model_fields.get(key.replace("-", "_"))
    return field is not None and field.annotation is bool


def _value(raw: str, text: bool) -> object:
    words: Mapping[str, object] = {"none": None, "true": True, "false": False}
    if raw.lower() in words and not (text and raw.lower() != "none"):
        return words[raw.lower()]
    if not text:
        for number in (int, float):
            try:
                return number(raw)
            except ValueError:
                continue
    return raw[1:-1] if len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "\"'" else raw
