"""Access control: accounts and permissions, signed requests, protection against replays, and the audit log.

Nothing here depends on gRPC: ``dledger.rpc.clients.grpc_server`` puts it before a server's handlers, and the clients
send what ``dledger.client`` makes. The model and the file are those of RocketMQ's ``plain_acl.yml``.
"""
