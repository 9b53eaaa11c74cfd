"""Constraints compiled by xgrammar, and a sequence's place in one. xgrammar is imported when the first is."""
