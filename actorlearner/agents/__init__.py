"""Agents: one file per algorithm."""
