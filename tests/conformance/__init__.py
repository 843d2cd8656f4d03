"""Transformers' own test mixins run against the TNT classes (see README.md beside this file)."""
