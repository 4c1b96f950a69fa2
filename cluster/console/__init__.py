"""The web console: one sampler that asks the nodes, one small server that shows what they said, and a page."""
