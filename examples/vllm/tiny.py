"""Make tiny models with random weights, of kinds of attention that the small model has not.

`python -m examples.vllm.tiny FOLDER`: a folder for each of `MODELS`. Their text means nothing; what
matters is that it depends on each token of the prompt that attention can see.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

WINDOW = 64
SMALL: dict[str, Any] = {
    "vocab_size": 49152,  # of the tokenizer in build/vllm/model
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
SHARED = {"num_key_value_heads": 2, "head_dim": 32}
SLIDING, FULL = "sliding_attention", "full_attention"

# Of each, the kind of transformers' and what differs from SMALL.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Three groups of two layers: one full, two with a window.
    "gemma3": (
        "gemma3_text",
        {
            **SHARED,
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
        },
    ),
    # Two groups of two layers.
    "gemma2": (
        "gemma2",
        {
            **SHARED,
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL] * 2,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
        },
    ),
    # MLA, of the only size that vLLM has on CPUs. Experts are not used.
    "deepseek": (
        "deepseek_v2",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "tie_word_embeddings": False,
        },
    ),
    # One group, with a window.
    "mistral": ("mistral", {**SHARED, "num_hidden_layers": 2, "sliding_window": WINDOW}),
}


def make(folder: Path, kind_of: str, tokenizer: Path) -> None:
    """Write one model: config.json, weights and tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, differs = MODELS[kind_of]
    config = AutoConfig.for_model(kind, **(SMALL | differs))
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large where a model begins with small ones, so that it is not the last token alone
            # that says which comes next.
            if parameter.ndim > 1 and "embed" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for item in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / item, folder / item)


if __name__ == "__main__":
    for each in MODELS:
        make(Path(sys.argv[1]) / each, each, Path(sys.argv[1]) / "model")
