"""All kinds that are compared, in the order of the page."""

from __future__ import annotations

from benchmarks.rivals.kinds import Kind

OURS = "memory that outlives the process, with digests"
FOLDER = "a folder of DCP"

KINDS = (
    Kind("ours", "ours: `Flashpoint`", "benchmarks.rivals.ours:Overlapped", leaves=OURS),
    Kind("ours-blocking", "ours: `Flashpoint(overlap=False)`", "benchmarks.rivals.ours:Blocking", leaves=OURS),
    Kind("copy", "a thread that only copies", "benchmarks.rivals.stock:CopyAlone", leaves="nothing"),
    Kind("dcp-thread", "`dcp.async_save`, cached stager, thread", "benchmarks.rivals.stock:AsyncSave", leaves=FOLDER),
    Kind(
        "dcp-process",
        "`dcp.async_save`, cached stager, process",
        "benchmarks.rivals.stock:AsyncSaveByProcess",
        leaves=FOLDER,
    ),
    Kind("torch-save", "`torch.save`", "benchmarks.rivals.stock:TorchSave", leaves="a file"),
    Kind(
        "lm-resiliency",
        "lm-resiliency",
        "benchmarks.rivals.others:LmResiliency",
        "lm-resiliency==0.2.0",
        leaves="memory of the process itself, without digests",
    ),
    Kind(
        "torch-checkpointing",
        "torch-checkpointing",
        "benchmarks.rivals.others:TorchCheckpointing",
        "torch-checkpointing==0.1.1",
        ("safetensors>=0.4.3", "typing_extensions>=4.6"),
        "a folder of files",
    ),
    Kind(
        "nvidia-resiliency-ext",
        "nvidia-resiliency-ext",
        "benchmarks.rivals.others:NvidiaResiliency",
        "nvidia-resiliency-ext",
        ("defusedxml", "nvidia-ml-py", "packaging", "pynvml", "pyyaml"),
        "a file; made synchronously: its asynchronous saves need a GPU",
    ),
    Kind(
        "ml-flashpoint",
        "ml-flashpoint",
        "benchmarks.rivals.others:MlFlashpoint",
        "ml-flashpoint==0.0.10",
        ("typing-extensions==4.15.0",),
        "memory that outlives the process, without digests",
    ),
)
