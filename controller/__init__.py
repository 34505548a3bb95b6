"""Decides how many draft tokens a speculative decode round uses; needs no simulator and no engine."""
