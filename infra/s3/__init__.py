"""An S3 store with Python alone: the Versity gateway over a folder, for tests and where Docker is not."""
