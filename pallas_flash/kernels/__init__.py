"""Kernel families, one folder per compiler."""
