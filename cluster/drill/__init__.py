"""Failover drills: a real group, a real fault, clients that run meanwhile, and a verdict on their messages.

``dledger drill NAME`` runs one. ``drills`` says what each does, ``target`` what it needs of a group; ``containers`` and
``processes`` are the two kinds of group. ``load`` runs the clients, ``watch`` looks at the nodes, ``readback`` reads
everything back; ``verdict`` and ``timeline`` judge what they recorded, and know neither clocks nor networks.
"""
