"""Plans as text for people: explain and diff. Reads plans; makes none, moves nothing."""
