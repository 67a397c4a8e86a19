"""Inspection: plans as text and as pictures. This room makes no plan and moves no byte."""
