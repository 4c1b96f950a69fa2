"""RocketMQ's remoting protocol (4.x) as far as it is not about messages: frames, connections, servers and clients.

Request codes, headers and bodies are those of the programs that use it: ``rocketstore.remoting`` has RocketMQ's.
"""
