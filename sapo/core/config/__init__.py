"""Settings of a run: schema, files, presets, homes, manifests, secrets."""
