"""vLLM's own scheduler with the connector in it: a program, which vLLM's Python runs.

It prints the effects of the connector's hooks on vLLM, as JSON. No model runs, and workers
exist only as their reports.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvplan.vllm.connector import KvplanHandshake, KvplanMetadata
from kvplan.vllm.step import WorkerAddress

BLOCK, BLOCKS, TOKENS = 16, 16, 40
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 1000,
    "torch_dtype": "float32",
}


class Engine:
    """A scheduler whose workers are the scenarios below."""

    def __init__(
        self,
        folder: Path,
        role: str,
        policy: str = "recompute",
        *,
        states: bool = False,
        contexts: int = 1,
        beside_offloading: bool = False,
    ) -> None:
        ours = {"kv_connector": "KvplanConnector", "kv_connector_module_path": "kvplan.vllm"}
        if beside_offloading:
            extra = {"cpu_bytes_to_use": 1 << 26}
            other = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
            both = [ours | {"kv_role": role}, other | {"kv_role": "kv_both"}]
            ours = {"kv_connector": "MultiConnector"}
            ours["kv_connector_extra_config"] = {"connectors": both}  # type: ignore[assignment]
        transfer = KVTransferConfig(
            **ours,  # type: ignore[arg-type]
            kv_role=role,
            engine_id=role,
            kv_load_failure_policy=policy,
        )
        caches = CacheConfig(block_size=BLOCK, enable_prefix_caching=not states)
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder), dtype="float32", max_model_len=256, skip_tokenizer_init=True
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=256,
                max_model_len=256,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=caches,
            parallel_config=ParallelConfig(
                tensor_parallel_size=contexts, decode_context_parallel_size=contexts
            ),
            kv_transfer_config=transfer,
        )
        caches.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layers.0.attn", "layers.1.attn"], spec)]
        if states:  # of a gated delta net
            mixer = MambaSpec(
                shapes=((3, 32), (2, 8, 4)),
                dtypes=(torch.float32, torch.float32),
                block_size=256,
                page_size_padded=spec.page_size_bytes,
                mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            )
            groups.append(KVCacheGroupSpec(["layers.2.mixer", "layers.3.mixer"], mixer))
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=256 if states else BLOCK * contexts,
            hash_block_size=BLOCK * contexts,
        )
        self.connector = self.scheduler.connector
        self.hasher = get_request_block_hasher(BLOCK * contexts, sha256)
        stages = (0,) if beside_offloading else (1, 0)
        workers = {(stage, 0): WorkerAddress(7 + stage, f"a:{stage}") for stage in stages}
        if contexts > 1:
            workers = {
                (0, rank): WorkerAddress(7 + rank, f"a:{rank}", None, (rank, contexts, 1))
                for rank in range(contexts)
            }
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {place: KvplanHandshake(address) for place, address in workers.items()}
        )

    def add(self, name: str, params: dict[str, Any]) -> None:
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        prompt = list(range(100, 100 + TOKENS))
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self.hasher))

    def step(self, **reported: Any) -> tuple[Any, dict[str, int], Any]:
        """Make a step, and return the workers' step, the scheduled tokens, and the answer."""
        planned = self.scheduler.schedule()
        scheduled = dict(planned.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={name: at for at, name in enumerate(scheduled)},
            sampled_token_ids=[[5] for _ in scheduled],
            kv_connector_output=KVConnectorOutput(**reported) if reported else None,
        )
        answers = self.scheduler.update_from_output(planned, output)
        client_outputs = [
            item for client_answers in answers.values() for item in client_answers.outputs
        ]
        metadata = planned.kv_connector_metadata
        (step,) = [
            connector_metadata.step
            for connector_metadata in getattr(metadata, "metadata", [metadata])
            if isinstance(connector_metadata, KvplanMetadata)
        ]
        return step, scheduled, (client_outputs or [None])[0]

    def held(self) -> tuple[bool, float]:
        return self.scheduler.has_requests(), self.scheduler.kv_cache_manager.usage


def produced(folder: Path) -> dict[str, Any]:
    """Finish a request: its blocks are held, and steps go on, until a worker reports it sent."""
    engine = Engine(folder, "kv_producer")
    engine.add("p", {"do_remote_decode": True})
    _, scheduled, answer = engine.step()
    held = engine.held()
    step, _, _ = engine.step()
    engine.step(finished_sending={"p"})
    engine.step()
    return {
        "scheduled": scheduled["p"],
        "params": answer.kv_transfer_params,
        "offered": [[offer.request, len(offer.blocks)] for offer in step.offers],
        "held": held[0] and held[1] > 0,
        "left": engine.held(),
        "delivers": engine.scheduler.requires_kv_delivery,
        "pushes": engine.connector.has_pending_push_work(),
    }


def fetched(folder: Path, params: dict[str, Any], policy: str, **failed: Any) -> dict[str, Any]:
    """Fetch a request, perhaps in vain, and return the tokens that are computed afterwards."""
    engine = Engine(folder, "kv_consumer", policy)
    engine.add("d", params)
    step, waiting, _ = engine.step()
    _, target = step.fetched["d"]
    if "blocks" in failed:
        failed = {"invalid_block_ids": set(target.blocks[failed["blocks"] :])}
    _, _, answer = engine.step(finished_recving={"d"}, **failed)
    scheduled: dict[str, int] = {}
    if answer is None:
        _, scheduled, answer = engine.step()
    engine.step()
    return {
        "waiting": waiting,
        "blocks": len(target.blocks),
        "computed": scheduled.get("d", 0),
        "reason": str(answer.finish_reason),
        "left": engine.held(),
        "delivers": engine.scheduler.requires_kv_delivery,
    }


def aborted(folder: Path, params: dict[str, Any]) -> dict[str, Any]:
    """Abort a request while it is fetched: its blocks are held until the result."""
    from vllm.v1.request import RequestStatus

    engine = Engine(folder, "kv_consumer")
    engine.add("d", params)
    engine.step()
    engine.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    held = engine.held()
    step, _, _ = engine.step()
    engine.step(finished_recving={"d"})
    engine.step()
    return {"held": held[0] and held[1] > 0, "cancelled": step.cancelled, "left": engine.held()}


def hybrid(folder: Path, **failed: Any) -> dict[str, Any]:
    """Move a request of a model with states from one engine to another."""
    prefill = Engine(folder, "kv_producer", states=True)
    prefill.add("p", {"do_remote_decode": True})
    _, scheduled, answer = prefill.step()
    step, _, _ = prefill.step()
    decode = Engine(folder, "kv_consumer", states=True)
    decode.add("d", answer.kv_transfer_params)
    begun, _, _ = decode.step()
    _, target = begun.fetched["d"]
    _, _, ended = decode.step(finished_recving={"d"}, **failed)
    computed: dict[str, int] = {}
    if ended is None:
        _, computed, ended = decode.step()
    decode.step()
    prefill.step(finished_sending={"p"})
    prefill.step()
    return {
        "scheduled": scheduled["p"],
        "offered": [len(table.blocks) for table in step.offers[0].blocks],
        "fetched": [len(table.blocks) for table in target.blocks],
        "null": any(0 in table.blocks for table in (*target.blocks, *step.offers[0].blocks)),
        "computed": computed["d"],
        "reason": str(ended.finish_reason),
        "left": [decode.held(), prefill.held()],
    }


def offloaded(folder: Path) -> dict[str, Any]:
    """Move a request between engines that also offload blocks, by vLLM's MultiConnector."""
    prefill = Engine(folder, "kv_producer", beside_offloading=True)
    prefill.add("p", {"do_remote_decode": True})
    _, scheduled, answer = prefill.step()
    held = prefill.held()
    step, _, _ = prefill.step()
    decode = Engine(folder, "kv_consumer", beside_offloading=True)
    decode.add("d", answer.kv_transfer_params)
    begun, waiting, _ = decode.step()
    _, target = begun.fetched["d"]
    decode.step(finished_recving={"d"})
    _, computed, _ = decode.step()
    prefill.step(finished_sending={"p"})
    prefill.step()
    return {
        "scheduled": scheduled,
        "held": held[0] and held[1] > 0,
        "blocks": [len(step.offers[0].blocks), len(target.blocks)],
        "waiting": waiting,
        "computed": computed,
        "used": prefill.held()[1],  # the other connector waits for its own workers
    }


def shared_out(folder: Path) -> dict[str, Any]:
    """Move a request whose tokens two ranks share to an equal engine; a block fails."""
    prefill = Engine(folder, "kv_producer", contexts=2)
    prefill.add("p", {"do_remote_decode": True})
    _, _, answer = prefill.step()
    step, _, _ = prefill.step()
    decode = Engine(folder, "kv_consumer", contexts=2)
    decode.add("d", answer.kv_transfer_params)
    begun, _, _ = decode.step()
    _, target = begun.fetched["d"]
    decode.step(finished_recving={"d"}, invalid_block_ids={target.blocks[1]})
    _, computed, _ = decode.step()
    return {
        "sources": answer.kv_transfer_params["kvplan"]["sources"],
        "blocks": [len(step.offers[0].blocks), len(target.blocks)],
        "computed": computed,
    }


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(LLAMA))
        latent = folder / "one head"
        latent.mkdir()
        (latent / "config.json").write_text(json.dumps(LLAMA | {"num_key_value_heads": 1}))
        first = produced(folder)
        client_outputs = first["params"]
        runs: dict[str, Callable[[], Any]] = {
            "fetched": lambda: fetched(folder, client_outputs, "recompute"),
            "a block failed": lambda: fetched(folder, client_outputs, "recompute", blocks=1),
            "all failed": lambda: fetched(
                folder, client_outputs, "recompute", failed_recving={"d"}
            ),
            "failed for good": lambda: fetched(
                folder, client_outputs, "fail", failed_recving={"d"}
            ),
            "aborted": lambda: aborted(folder, client_outputs),
            "offloaded": lambda: offloaded(folder),
            "shared out": lambda: shared_out(latent),
            "states": lambda: hybrid(folder),
            "states failed": lambda: hybrid(folder, failed_recving={"d"}),
        }
        found = {"produced": first} | {name: run() for name, run in runs.items()}
        sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
