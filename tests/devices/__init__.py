"""Fakes of devices, built from documented behaviour. Each refuses what its document refuses."""
