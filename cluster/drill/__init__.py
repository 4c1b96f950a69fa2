"""Failover drills: a real group, a real fault, clients running meanwhile, and a verdict on their messages.

``python -m cluster.drill NAME`` runs one. ``drills`` defines them, ``target`` what they need of a group, whose nodes it
polls; ``containers`` and ``processes`` are the two kinds of group. ``load`` runs the clients and reads everything back;
``verdict`` and ``history`` evaluate the records without clocks or networks.
"""
