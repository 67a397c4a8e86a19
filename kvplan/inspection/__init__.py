"""Inspection: plans as text and as pictures. This room makes no plan and moves no byte.

Planning imports this room only in methods of `Plan`, and in the refusal of a plan that is outdated.
"""
