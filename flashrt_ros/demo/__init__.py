"""A small simulated robot, its policy, the story of `make demo`, and the study. See docs/demo.md.

Nobody imports this package; it may import everything.
"""
