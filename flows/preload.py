"""Imports what nodes, archive and evaluation need, for the fork server (`sapo.ops.fork_server`)."""

import contextlib
import gc

# before all else that imports transformers: who does so first decides what comes along

# isort: split
# every node needs these when it registers its first version: 230 modules more held its rounds up for seconds
import mlflow.pyfunc.model
import mlflow.transformers  # noqa: F401

from . import archive, evaluate, node  # noqa: F401

with contextlib.suppress(ImportError):  # optional; where it is installed, MLflow and transformers load it
    import peft  # noqa: F401

# what all processes share stays shared: no collector goes over it
gc.collect()
gc.freeze()
