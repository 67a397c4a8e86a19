"""A model file like the real one, of a thousandth of its size.

The model has a tokenizer of single bytes and random weights, so its text makes no sense. But every
token depends on all tokens before it, as the demo needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

from examples.disaggregated.requirements import WEIGHTS_FILE, WEIGHTS_PACKAGE
from examples.disaggregated.tokenizer import CONTROL
from tests.demo.tiny_llama import CONFIG, TinyLlama

NORMAL = 1
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|end|>"]
SEED = 4
"""The seed of the weights. With this seed, the wrong block changes one of the first tokens."""


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Make started processes find the tiny model in place of the real one."""
    package = folder / WEIGHTS_PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    write(package / WEIGHTS_FILE)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def write(path: Path) -> None:
    tokens = [*sorted(ByteLevel.alphabet()), "th", *SPECIAL]
    config = replace(CONFIG, context_length=8192)
    weights = TinyLlama(SEED, vocabulary=len(tokens))
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.layers)
    writer.add_embedding_length(config.embedding)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_context_length(config.context_length)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in SPECIAL else NORMAL for token in tokens])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_tensor("token_embd.weight", weights.embedding)
    writer.add_tensor("output_norm.weight", weights.norm)
    for number, layer in enumerate(weights.layers):
        heads = (config.heads, config.heads + config.kv_heads)
        query, key, value = (
            layer.qkv[first * config.head_size : last * config.head_size]
            for first, last in zip((0, *heads), (*heads, heads[1] + config.kv_heads), strict=True)
        )
        gate, up = layer.gate_up.reshape(2, -1, config.embedding)
        for name, weight in {
            "attn_norm": layer.attention_norm,
            "attn_q": query,
            "attn_k": key,
            "attn_v": value,
            "attn_output": layer.attention_output,
            "ffn_norm": layer.mlp_norm,
            "ffn_gate": gate,
            "ffn_up": up,
            "ffn_down": layer.down,
        }.items():
            writer.add_tensor(f"blk.{number}.{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
