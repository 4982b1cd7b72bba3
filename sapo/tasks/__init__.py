"""Questions and their verifier, in worker processes behind a sandbox."""
