"""Failover drills: a real group, a real fault, clients running meanwhile, and a verdict on their messages.

``python -m cluster.drill NAME`` runs one. ``drills`` defines them, ``target`` what they need of a group; ``containers``
and ``processes`` are the two kinds of group. ``load`` runs the clients, ``watch`` polls the nodes, ``readback`` reads
everything back; ``verdict`` and ``timeline`` evaluate the records without clocks or networks.
"""
