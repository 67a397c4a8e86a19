"""Inspection: plans as text and as pictures. This room makes no plan and moves no byte.

Planning must not import this room, except in the methods of `Plan` that show the plan.
"""
