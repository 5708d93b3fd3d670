"""Tests of the rendezvous core in a simulated world (world.py) and of its tables."""
