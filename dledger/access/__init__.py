"""Who may do what: accounts and their permissions, signed requests, what is remembered of them, and the audit log.

Nothing here knows gRPC: ``dledger.rpc.clients.access_gate`` puts it before the handlers of a server, and the clients
send what ``signing`` makes. The model and the file are those of RocketMQ's ``plain_acl.yml``.
"""
