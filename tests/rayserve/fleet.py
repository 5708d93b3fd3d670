"""A mixed emulated fleet under Ray Serve LLM: serves until its standard input ends.

python -m tests.rayserve.fleet FOLDER PORT
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray
import yaml
from ray import serve

from neuron_push import rayserve
from neuron_push.emulation import VARIABLE, WORKER, models
from neuron_push.emulation.devices import DEVICES
from neuron_push.emulation.options import Options, encode

ROOT = Path(__file__).resolve().parents[2]
# As deploy/ray/pd.yaml says it, but for the devices and their sizes.
RECIPE = ROOT / "deploy/ray/pd.yaml"


def arguments(folder: Path) -> dict:
    """The recipe's, on emulated devices: prefill on trn2, decode on p5en."""
    (application,) = yaml.safe_load(RECIPE.read_text())["applications"]
    model = models.find("tiny-mla", folder)
    for leg, device in (("prefill", "trn2"), ("decode", "p5en")):
        config = application["args"][f"{leg}_config"] = dict(application["args"][f"{leg}_config"])
        config["model_loading_config"] = {"model_id": "emulated", "model_source": str(model)}
        config["accelerator_config"] = {"kind": "cpu"}
        config["placement_group_config"] = {"bundles": [{"CPU": 1}]}
        config["log_engine_metrics"] = False
        transfer = dict(config["engine_kwargs"]["kv_transfer_config"])
        transfer["kv_connector_extra_config"] = {"accelerator": "emulated", "trace_events": 4096}
        config["engine_kwargs"] = {
            "kv_transfer_config": transfer, "worker_cls": WORKER, "enforce_eager": True,
            "block_size": DEVICES[device].block_tokens, "num_gpu_blocks_override": 400,
            "max_model_len": 4096, "max_num_batched_tokens": 512, "dtype": "float32",
        }  # fmt: skip
        emulation = Options(device=device, profile="quick", report=str(folder / leg))
        config["runtime_env"] = {"env_vars": {
            VARIABLE: encode(emulation), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "UCX_TLS": "tcp,self", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1",
        }}  # fmt: skip
    application["args"]["ingress_deployment_config"] = {
        "num_replicas": 1, "autoscaling_config": None,
    }  # fmt: skip
    return application["args"]


def main(folder: str, port: str) -> None:
    ray.init(
        address="local", num_cpus=6, object_store_memory=100 << 20, include_dashboard=False,
        _temp_dir=f"/tmp/nprs-{port}", log_to_driver=True,
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(rayserve.app(arguments(Path(folder))), name="pd", route_prefix="/")
    print("SERVING", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
