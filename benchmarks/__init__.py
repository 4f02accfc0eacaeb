"""Compares this package with others and measures its own costs; see README.md in this folder."""
