"""A headless Chromium from parts that pip installs, for tests of web pages and for pictures of them."""
