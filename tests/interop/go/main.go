// Sends numbered messages for so many seconds, whatever fails, or receives them:
//
//	interop load NAME_SERVERS TOPIC SECONDS
//	interop consume NAME_SERVERS TOPIC COUNT
//
// load says for each message that was acknowledged when that was.
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const timeout = 120 * time.Second

func main() {
	rlog.SetLogLevel("error")
	resolver := primitive.NewPassthroughResolver(strings.Split(os.Args[2], ";"))
	count, err := strconv.Atoi(os.Args[4])
	check(err)
	if os.Args[1] == "load" {
		load(resolver, os.Args[3], time.Duration(count)*time.Second)
	} else {
		consume(resolver, os.Args[3], count)
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func load(resolver primitive.NsResolver, topic string, duration time.Duration) {
	made, err := rocketmq.NewProducer(producer.WithNsResolver(resolver), producer.WithGroupName("interop-go"))
	check(err)
	check(made.Start())
	begin := time.Now()
	for number := 0; time.Since(begin) < duration; number++ {
		message := primitive.NewMessage(topic, []byte(strconv.Itoa(number)))
		result, err := made.SendSync(context.Background(), message)
		if err != nil || result.Status != primitive.SendOK {
			time.Sleep(20 * time.Millisecond)
			continue
		}
		fmt.Println(">", number, time.Now().UnixMilli())
	}
	check(made.Shutdown())
}

func consume(resolver primitive.NsResolver, topic string, count int) {
	var lock sync.Mutex
	found := map[string]bool{}
	all := make(chan bool, 1)
	made, err := rocketmq.NewPushConsumer(
		consumer.WithNsResolver(resolver),
		consumer.WithGroupName("interop-go"),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset))
	check(err)
	take := func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		lock.Lock()
		defer lock.Unlock()
		for _, message := range messages {
			found[string(message.Body)] = true
		}
		if len(found) == count {
			select {
			case all <- true:
			default:
			}
		}
		return consumer.ConsumeSuccess, nil
	}
	check(made.Subscribe(topic, consumer.MessageSelector{}, take))
	check(made.Start())
	select {
	case <-all:
	case <-time.After(timeout):
		panic(fmt.Sprintf("received %d of %d messages", len(found), count))
	}
	check(made.Shutdown())
	for number := range found {
		fmt.Println(">", number)
	}
}
