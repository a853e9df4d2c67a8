"""Config classes of the served families: `ouro` and `huginn_raven`.

The Hub repositories bring their own config code, which transformers 5 cannot run. `register()` makes
transformers (and so SGLang) use these classes instead, without ``--trust-remote-code``: a locally registered
class wins over a repository's ``auto_map``.

Contract with SGLang's ``ModelConfig``: the usual names are readable on both classes (hidden_size,
num_attention_heads, num_key_value_heads, head_dim, num_hidden_layers, vocab_size, max_position_embeddings,
architectures, rope_parameters). `num_hidden_layers` counts physical layers. Neither class has `loop_num` or
`num_loops`: KV layers are counted by the model's ``start_layer``/``end_layer`` alone, see `layer_ids`.

SGLang applies ``--json-model-override-args`` by plain attribute assignment after the config was built, so
every assignment is checked: a value that would not be served as documented raises one sentence, and it does
so in the launching process. Rules between fields are in `check()`, for the models to call again at load.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, PreTrainedConfig

from sglang_trunc.models.field_checks import FieldCheck, at_least, last_step_only, not_below_zero, one_of
from sglang_trunc.models.layer_ids import LoopShape

logger = logging.getLogger(__name__)

BLOCK_KINDS = ("huginn", "llama", "olmo2")


class LoopedConfig(PreTrainedConfig):  # type: ignore[misc]  # an untyped base
    """What the two families share: checked assignment, one RoPE form, loop counts."""

    recurrence_field: ClassVar[str] = ""
    field_checks: ClassVar[Mapping[str, FieldCheck]] = {}
    default_theta: ClassVar[float] = 10_000.0

    # Recurrences the checkpoint was trained with; None means the stored count.
    trained_recurrences: int | None = None
    rope_parameters: dict[str, Any] | None = None
    architectures: list[str] | None = None
    dtype: str | torch.dtype | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # Published Raven files are stored in float32 and meant for bfloat16, but SGLang's ``--dtype auto``
        # turns float32, and a missing dtype, into float16. An explicit ``--dtype`` does not look here.
        if self.dtype in (None, torch.float32):
            self.dtype = torch.bfloat16
        if self.trained_recurrences is None:
            self.trained_recurrences = self.recurrences
        self.check()

    def __setattr__(self, key: str, value: Any) -> None:
        key = self.attribute_map.get(key, key)
        if key in self.field_checks:
            self.field_checks[key](key, value)
        if key == self.recurrence_field:
            self._warn_above_trained(value)
        super().__setattr__(key, value)

    def _warn_above_trained(self, value: int) -> None:
        trained = self.__dict__.get("trained_recurrences")
        if trained is not None and value > trained:
            logger.warning(
                "%s is %d, more than the %d recurrences the model was trained with: output may get worse.",
                self.recurrence_field,
                value,
                trained,
            )

    # transformers 5 keeps theta inside rope_parameters; an override of rope_theta has to reach it there.
    @property
    def rope_theta(self) -> float:
        stored: dict[str, Any] = self.__dict__.get("rope_parameters") or {}
        return float(stored.get("rope_theta", self.default_theta))

    @rope_theta.setter
    def rope_theta(self, value: float) -> None:
        self.rope_parameters = {**(self.rope_parameters or {}), "rope_theta": value}

    @property
    def recurrences(self) -> int:
        """R, the full depth."""
        return int(getattr(self, self.recurrence_field))

    @recurrences.setter
    def recurrences(self, value: int) -> None:
        setattr(self, self.recurrence_field, value)

    @property
    def loop_shape(self) -> LoopShape:
        return LoopShape(self.prelude_layers, self.core_layers, self.coda_layers, self.recurrences)

    def check(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads is {kv_heads}, but must divide num_attention_heads, which is {heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, but must be even for rotary positions.")
        if self.loop_shape.num_layers != self.num_hidden_layers:
            raise ValueError(
                f"num_hidden_layers is {self.num_hidden_layers}, but prelude, core and coda have "
                f"{self.prelude_layers} + {self.core_layers} + {self.coda_layers} layers."
            )


class OuroConfig(LoopedConfig):
    model_type = "ouro"
    default_theta = 1_000_000.0
    recurrence_field = "total_ut_steps"
    keys_to_ignore_at_inference = ["past_key_values"]
    field_checks = {
        "total_ut_steps": at_least(1),
        "num_hidden_layers": at_least(1),
        "early_exit_threshold": last_step_only,
        "early_exit_step": one_of(None),
        "use_weighted_exit": one_of(False, None),
        "use_sliding_window": one_of(False, None),
        "hidden_act": one_of("silu"),
        "attention_bias": one_of(False, None),
    }

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    total_ut_steps: int = 4
    early_exit_threshold: float | None = 1.0
    early_exit_step: int | None = None
    use_weighted_exit: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.architectures = self.architectures or ["OuroForCausalLM"]
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        # SGLang reads a window from this field alone and would cut attention by it.
        self.sliding_window = None
        super().__post_init__(**kwargs)

    @property
    def prelude_layers(self) -> int:
        return 0

    @property
    def core_layers(self) -> int:
        return self.num_hidden_layers

    @property
    def coda_layers(self) -> int:
        return 0

    def check(self) -> None:
        super().check()
        kinds = set(self.layer_types or ()) - {"full_attention"}
        if kinds:
            raise ValueError(f"layer_types names {sorted(kinds)}, but only full_attention can be served.")


class RavenConfig(LoopedConfig):
    """Huginn-0125 and the retrofitted Llama, TinyLlama and OLMo-2 models.

    Nothing in their files names the block type: `block_kind` stays None and is found from the checkpoint's
    tensor names (`checkpoint.detect_block_kind`) unless an override sets it.
    """

    model_type = "huginn_raven"
    recurrence_field = "mean_recurrence"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    }
    field_checks = {
        "mean_recurrence": at_least(1),
        "n_layers_in_prelude": at_least(0),
        "n_layers_in_recurrent_block": at_least(1),
        "n_layers_in_coda": at_least(0),
        "state_init_seed": at_least(0),
        "init_scale": not_below_zero,
        "block_kind": one_of(None, *BLOCK_KINDS),
        "injection_type": one_of("linear"),
        "state_init": one_of("like-init"),
        "test_time_noise": one_of(0, None),
        "bias": one_of(False),
    }

    n_embd: int = 5280
    n_heads: int = 55
    n_layers: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 17920
    vocab_size: int = 65536
    padded_vocab_size: int | None = None
    block_size: int = 4096
    max_position_embeddings: int | None = None
    norm_eps: float = 1e-6
    rope_base: float = 50_000.0
    qk_bias: bool = True
    bias: bool = False
    tie_embeddings: bool | None = None
    injection_type: str = "linear"
    state_init: str = "like-init"
    test_time_noise: float | None = 0
    n_layers_in_prelude: int = 2
    n_layers_in_recurrent_block: int = 4
    n_layers_in_coda: int = 2
    mean_recurrence: int = 32
    init_values: Any = None  # dictionary with std and embed_scale; None derives them
    # Initial state of a token: a function of (state_init_seed, position); init_scale 0 gives zeros.
    state_init_seed: int = 0
    init_scale: float = 1.0
    block_kind: str | None = None
    bos_token_id: int | None = 65504
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = 65509

    def __post_init__(self, **kwargs: Any) -> None:
        # Older files spell these only in the common way; the own names decide where both are there.
        for common, own in self.attribute_map.items():
            value = kwargs.pop(common, None)
            if value is not None and getattr(self, own) in (None, type(self).__dict__.get(own)):
                setattr(self, own, value)
        self.architectures = self.architectures or ["RavenForCausalLM"]
        if self.tie_embeddings is None:
            self.tie_embeddings = True
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.n_heads
        if self.head_dim is None:
            self.head_dim = self.n_embd // self.n_heads
        if self.max_position_embeddings is None:
            self.max_position_embeddings = self.block_size
        # The head has a row for every padded id, and SGLang sizes logits by vocab_size.
        self.vocab_size = self.padded_vocab_size = self.padded_vocab_size or self.vocab_size
        self.init_values = {**self._derived_init(), **(self.init_values or {})}
        # In the retrofits rope_base is Huginn's left-over and rope_theta counts; Huginn has rope_base alone.
        kwargs.setdefault("rope_theta", self.rope_base)
        super().__post_init__(**kwargs)

    def _derived_init(self) -> dict[str, float]:
        return {"std": math.sqrt(2 / (5 * self.n_embd)), "embed_scale": math.sqrt(self.n_embd)}

    @property
    def prelude_layers(self) -> int:
        return self.n_layers_in_prelude

    @property
    def core_layers(self) -> int:
        return self.n_layers_in_recurrent_block

    @property
    def coda_layers(self) -> int:
        return self.n_layers_in_coda

    @property
    def embed_scale(self) -> float:
        return float(self.init_values["embed_scale"])

    @property
    def state_std(self) -> float:
        """Standard deviation of the initial state, embedding scale included; 0 means zeros."""
        return float(self.init_values["std"]) * self.init_scale * self.embed_scale


def register() -> None:
    """Make transformers build these classes for the two model types; may be called any number of times."""
    for config_class in (OuroConfig, RavenConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
