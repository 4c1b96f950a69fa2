"""RocketMQ's requests (4.x): codes, headers and bodies. Independent of brokers; ``dledger.remoting`` carries them."""
