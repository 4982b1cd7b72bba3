"""Lets every test import the helpers beside this file, such as `makers`."""
