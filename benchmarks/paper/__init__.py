"""The paper's experiments, run again: ``make paper``."""
