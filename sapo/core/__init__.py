"""What everything stands on: types, config, randomness, files. Loads no torch and no service."""
