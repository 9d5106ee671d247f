module braid/clients

go 1.24

require github.com/apache/pulsar-client-go v0.19.0
