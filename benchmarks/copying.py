from benchmarks.table import Topic
TOPIC = Topic()
