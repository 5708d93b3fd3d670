"""The mixed-fleet matrix: what is tried, on what, and what came of it.

cells     matrix.yaml -> cells of a tier
states    what can become of a cell
pool      engines shared by cells
hardware  engines that run on real nodes
load      requests through a pair of engines
checks    what must hold of them
report    table, JUnit, JSON, HTML
command   `ci/run_matrix`
"""
