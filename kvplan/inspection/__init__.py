"""Inspection: plans as text and as pictures. It makes no plan and moves no byte.

Planning must not import it, except for the methods of `Plan` that show the plan.
"""
