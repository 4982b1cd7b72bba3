"""Imports what nodes, archive and evaluation need, for the fork server (`sapo.ops.fork_server`)."""

import contextlib
import gc
from importlib import import_module

MODULES = (
    # before all else that imports transformers: who does so first decides what comes along. Every node needs
    # these when it registers its first version: 230 modules more held its rounds up for seconds
    "mlflow.pyfunc.model",
    "mlflow.transformers",
    "sapo.flows.archive",
    "sapo.flows.evaluate",
    "sapo.flows.node",
)

gc.disable()  # modules are no garbage, and looking for some takes two seconds
for name in MODULES:
    import_module(name)
with contextlib.suppress(ImportError):  # optional; where it is installed, MLflow and transformers load it
    import_module("peft")

# what all processes share stays shared: no collector goes over it
gc.collect()
gc.freeze()
gc.enable()
