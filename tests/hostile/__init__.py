"""Whole ranks over real NIXL and a real side channel, stopped and killed at every point."""
