"""The attention back end: its specification, its metadata, and its forward pass, for CPU and CUDA alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

from centroidkv.errors import RotaryError, ServingError
from centroidkv.integrations.rope import rotary_of
from centroidkv.integrations.vllm.manager import CentroidSpec
from centroidkv.integrations.vllm.options import WORKER, ServingOptions
from centroidkv.paged.attend import attend, causal_attention
from centroidkv.paged.batch import Batch, lay_out
from centroidkv.paged.cluster import cluster
from centroidkv.paged.pages import Pages
from centroidkv.rotary import Rotary


class CentroidBackend(AttentionBackend):
    """Attention over clusters: softmax(scale q.k + ln N) v, ln N read from beside the keys and values."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CentroidImpl]:
        return CentroidImpl

    @staticmethod
    def get_builder_cls() -> type[CentroidBuilder]:
        return CentroidBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A block's heads one after the other: a page is one head's."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        config = get_current_vllm_config_or_none()  # our worker sees to it that there is one
        options = None if config is None else ServingOptions.read(config.additional_config)
        if options is None:
            raise ServingError(
                "the attention back end for clustering was chosen, but the worker does not cluster; add --worker-cls "
                f"{WORKER} and additional_config['centroidkv']"
            )
        if type(spec) is not FullAttentionSpec or spec.sliding_window is not None:
            raise ServingError(
                f"clustering serves models whose layers all have full attention, got a layer with {spec!r}"
            )
        ours = CentroidSpec.from_full(spec, options, config.model_config.max_model_len)
        if not ours.plan.acts(ours.max_tokens):
            raise ServingError(
                f"with {options} and blocks of {spec.block_size} no request of up to max_model_len={ours.max_tokens} "
                "tokens would ever be clustered; lower the budget, the windows or --block-size"
            )
        return ours


@dataclass
class CentroidMetadata:
    """A step's batch, and what clustering within it needs."""

    batch: Batch
    builder: CentroidBuilder


class CentroidBuilder(AttentionMetadataBuilder[CentroidMetadata]):
    """Turns a step's block tables into the blocks that still hold something."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.plan = kv_cache_spec.plan
        self.rotary: Rotary | None = None
        if kv_cache_spec.positions:
            try:
                self.rotary = rotary_of(vllm_config.model_config.hf_text_config)
            except RotaryError as error:
                raise ServingError(
                    f"this preset looks at keys before RoPE, and {error}. In a server: a preset that does not, such as "
                    "'centroidkv'"
                ) from error
        self.group = 0
        self._names = layer_names
        self._config = vllm_config
        self._runner: Any = None
        self._pages: list[Pages] | None = None

    def attach(self, runner: Any) -> None:
        """Name the model runner, whose input batch knows the prompt lengths."""
        self._runner = runner

    @property
    def pages(self) -> list[Pages]:
        """Pages of all layers of this group."""
        if self._pages is None:
            layers = get_layers_from_vllm_config(self._config, Attention, self._names)
            self._pages = [layers[name].impl.pages_of(layers[name].kv_cache) for name in self._names]
        return self._pages

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CentroidMetadata:
        common = common_attn_metadata
        if self._runner is None:
            raise ServingError(f"the worker has not introduced itself; use --worker-cls {WORKER}")
        requests = common.num_reqs
        held = self._runner.input_batch
        # In a dry run the batch is made up, and no request stands behind it.
        prompts = held.num_prompt_tokens[: held.num_reqs].tolist()[:requests]
        prompts += [1 << 30] * (requests - len(prompts))
        starts = common.query_start_loc_cpu[: requests + 1].tolist()
        lengths = common.seq_lens[:requests].tolist()
        return CentroidMetadata(lay_out(self.plan, prompts, starts, lengths, common.block_table_tensor), self)


class CentroidImpl(AttentionImpl):
    """Attention of one layer over its pages."""

    prompts = staticmethod(causal_attention)
    """How a prompt attends while nothing of it is clustered."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Any = None,
        **more: Any,
    ) -> None:
        reasons = [
            name
            for name, given in (
                ("ALiBi", alibi_slopes), ("a sliding window", sliding_window), ("a soft cap", logits_soft_cap),
                ("keys shared between layers", kv_sharing_target_layer_name), ("learned sinks", sinks is not None),
                (f"attention of type {attn_type}", attn_type != AttentionType.DECODER),
            ) if given
        ]  # fmt: skip
        if reasons:
            raise ServingError(f"clustering does not serve layers with {', '.join(reasons)}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size, self.scale = head_size, float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self._cache: Tensor | None = None
        self._pages: Pages | None = None

    def pages_of(self, cache: Tensor) -> Pages:
        """Views into the layer's cache, made once."""
        if self._pages is None or self._cache is not cache:
            content = cache.shape[-1] * cache.element_size() - 2 * self.head_size * cache.element_size()
            self._pages = Pages.of(cache, self.head_size, self.head_size, positions=content == 8)
            self._cache = cache
        return self._pages

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the step's raw tokens. Padding, slot -1, goes to the null block, which nobody reads."""
        new = slot_mapping.shape[0]
        self.pages_of(kv_cache).write(key[:new], value[:new], slot_mapping.clamp(min=0))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CentroidMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # a dry run
            return output
        pages, builder = self.pages_of(kv_cache), attn_metadata.builder
        tokens = attn_metadata.batch.tokens
        out = output[:tokens].view(tokens, self.num_heads, self.head_size)

        def carry_out(blocks: Tensor, event: Any) -> None:
            cluster([pages], blocks.tolist(), event, builder.plan, builder.rotary)

        attend(query[:tokens].view_as(out), pages, attn_metadata.batch, self.scale, out, carry_out, self.prompts)
        return output
