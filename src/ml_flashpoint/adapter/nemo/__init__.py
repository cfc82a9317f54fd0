"""NeMo 2.0: quick checkpoints in memory beside the long-term ones of its trainer.

NeMo 3.0 has no `nemo.lightning` any more; this package is for 2.4 up to that.
"""

from ml_flashpoint.extras import DISTRIBUTION

try:
    import nemo.lightning.io.pl
    import nemo.lightning.resume  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"ml_flashpoint.adapter.nemo cannot import nemo.lightning: {error}. It needs nemo_toolkit[lightning] from 2.4 "
        "on and below 3, the first version without nemo.lightning.resume and nemo.lightning.io.pl, and "
        "nvidia-resiliency-ext, which nemo.lightning imports. Run: "
        f'pip install "{DISTRIBUTION}[nemo]" nvidia-resiliency-ext'
    ) from error
